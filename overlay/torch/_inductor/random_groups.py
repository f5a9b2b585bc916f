"""
Random numbers four at a time, as Philox makes them.

Philox computes four numbers of a counter in some 60 instructions, of which ``tl.rand``
keeps one: the kernels of a dropout are bound by them. Here an offset's number is one of
the four of ``offset // 4``. A tile whose last dimension holds whole groups of offsets
computes each of them once.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, TYPE_CHECKING

import sympy

from .virtualized import V


if TYPE_CHECKING:
    from .codegen.simd import IterationRangesRoot
    from .codegen.triton import TritonKernel


# Numbers that a call of Philox makes.
GROUP = 4


class Groups(NamedTuple):
    """
    Offsets of a tile that are ``GROUP * outer`` plus the index along ``tree``, the tile's
    last dimension.
    """

    tree: IterationRangesRoot
    outer: sympy.Expr


def codegen_rand(seed: str, offset: str) -> str:
    """Uniform float32 in [0, 1), one for each of the tile's ``offset``."""
    whole = f"{seed}, ({offset}).to(tl.uint32)"
    kernel, index = V.kernel, offset_of_rand()
    groups = None
    # a seed that was loaded as a tensor is as large as the tile
    if index is not None and getattr(seed, "shape", None) == ():
        groups = find_groups(kernel, index)
    if groups is None:
        return f"triton_helpers.rand({whole})"
    prefix = groups.tree.prefix
    block = f"{prefix.upper()}BLOCK"
    sizes = kernel.dense_size_list()
    for tree in kernel.range_trees:
        if tree is not groups.tree and tree.tensor_dim is not None:
            varies = any(
                kernel.range_tree_nodes[symbol].root is tree
                for symbol in groups.outer.free_symbols
                if symbol in kernel.range_tree_nodes
            )
            if not varies:
                sizes[tree.tensor_dim] = "1"
    along = kernel.indexing_size_str(groups.tree.tensor_dim)
    # at least one, for tiles of less than a group
    inner = f"({prefix}offset // 4 + tl.arange(0, ({block} + 3) // 4)){along}"
    outer = kernel.index_to_str(groups.outer)
    return (
        f"triton_helpers.rand_groups({whole}, ({outer}) + {inner}, "
        f"[{', '.join(sizes)}])"
    )


def offset_of_rand() -> Optional[sympy.Expr]:
    """The index of which the number is asked that is generated now; None if unknown."""
    node = getattr(V.interpreter, "current_node", None)
    if node is None or node.target != "rand":
        return None
    offset = node.args[2]
    if getattr(offset, "target", None) not in ("index_expr", "value_expr"):
        return None
    return V.interpreter.env.get(offset.args[1])


def find_groups(kernel: TritonKernel, index: sympy.Expr) -> Optional[Groups]:
    """How a tile's offsets are whole groups; None if they are not, or not known to be."""
    if kernel.cooperative_reduction:
        return None
    index = kernel.prepare_indexing(index)
    last = kernel.triton_tensor_ndim() - 1
    nodes = kernel.range_tree_nodes
    along = [
        nodes[symbol]
        for symbol in index.free_symbols
        if symbol in nodes and nodes[symbol].root.tensor_dim == last
    ]
    sizevars = V.graph.sizevars
    if (
        len(along) != 1
        or along[0].divisor != 1
        or not sizevars.statically_known_equals(along[0].length, along[0].root.numel)
    ):
        return None
    rest = sympy.expand(index - along[0].symbol())
    if along[0].symbol() in rest.free_symbols:
        return None
    terms = sympy.Add.make_args(rest)
    if any(term.as_coeff_Mul()[0] % GROUP != 0 for term in terms):
        return None
    outer = sympy.Add(*(term / GROUP for term in terms))
    return Groups(along[0].root, outer)
