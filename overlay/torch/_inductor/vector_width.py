"""
How many adjacent elements a thread loads at once.

The compiler widens an access up to what it may assume of the address, 16 bytes at most:
to be told less makes it narrower.

In a mix-order kernel that matters where types differ in width. Triton gives all
accesses of one shape whose addresses have an index in common the same layout, with as
many columns a thread as the narrowest type has in 16 bytes. Next to a mask of bytes a
thread has 16 columns, which are 64 bytes of a float32 tensor: its copies to shared
memory are four that lie 64 bytes apart from those of the next thread, and what is read
from there changes its layout before it is computed with. So the narrower ones get as
many columns as the widest has in 16 bytes.
"""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING

import sympy

from .codegen.common import TensorArg
from .dependencies import MemoryDep
from .mix_order_accesses import accessed_numel
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .codegen.simd_kernel_features import SIMDKernelFeatures


VECTOR_BYTES = 16  # the widest access of a thread
# An asynchronous copy to shared memory has at least 4 bytes, so 4 columns of bytes.
MIN_COLUMNS = 4


def limit_alignment(
    attributes: Any, signature: Sequence[Any], alignment: dict[str, int]
) -> None:
    """
    Lower what ``attributes``, of the arguments in ``signature`` by position, say of the
    addresses of the buffers in ``alignment``, to so many bytes.
    """
    if not isinstance(attributes, dict):  # of Triton before 3.3
        return
    for i, arg in enumerate(signature):
        if (
            isinstance(arg, TensorArg)
            and arg.buffer in alignment
            and (i,) in attributes
        ):
            attributes[(i,)] = [["tt.divisibility", alignment[arg.buffer]]]


def even_columns(itemsizes: Iterable[int]) -> int:
    """
    Columns that a thread loads at once of tensors whose elements have ``itemsizes``
    bytes, where it loads as many of each.
    """
    return max(MIN_COLUMNS, VECTOR_BYTES // max(itemsizes))


def even_vectors(
    attributes: Any, signature: Sequence[Any], features: SIMDKernelFeatures
) -> None:
    """
    Lower what ``attributes``, of the arguments in ``signature`` by position, say of the
    addresses of tensors that are accessed whole, so that a thread has as many columns
    of each as of the widest type.
    """
    whole = accesses(features, features.numel * features.reduction_numel)
    itemsizes = {
        arg.buffer: arg.dtype.itemsize
        for arg in signature
        if isinstance(arg, TensorArg) and arg.buffer in whole
    }
    if not itemsizes:
        return
    columns = even_columns(itemsizes.values())
    narrower = {
        name: columns * itemsize
        for name, itemsize in itemsizes.items()
        if columns * itemsize < VECTOR_BYTES
    }
    limit_alignment(attributes, signature, narrower)


def accesses(
    features: SIMDKernelFeatures, numel: sympy.Expr
) -> dict[str, list[MemoryDep]]:
    """By buffer, the accesses of a kernel that touch ``numel`` elements."""
    found: dict[str, list[MemoryDep]] = {}
    for name, deps in features.buf_accesses().items():
        for dep in deps:
            if isinstance(
                dep, MemoryDep
            ) and V.graph.sizevars.statically_known_equals(accessed_numel(dep), numel):
                found.setdefault(name, []).append(dep)
    return found


def aligned_columns(dep: MemoryDep, most_bytes: int = VECTOR_BYTES) -> int:
    """
    Adjacent columns that a thread can load at once, or that are in so many bytes, of rows that
    begin where ``dep`` says: 1 where their stride is odd.
    """
    alignment = most_bytes
    for term in sympy.Add.make_args(sympy.expand(dep.index)):
        stride, rest = term.as_coeff_Mul()
        if stride != 1 or rest == 1 or rest.free_symbols - dep.ranges.keys():
            alignment = math.gcd(alignment, int(stride))
    itemsize = V.graph.get_dtype(dep.name).itemsize
    return max(1, min(alignment, most_bytes // itemsize))


def largest_divisor(columns: sympy.Expr, vector: int) -> int:
    """Of ``columns``, the largest known power of two up to ``vector``, which is one."""
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    while vector > 1 and not is_multiple(columns, vector):
        vector //= 2
    return vector


def adjacent_columns(dep: MemoryDep, columns: sympy.Expr) -> int:
    """Those that a thread can load at once of rows of ``columns`` where no mask is."""
    vector = aligned_columns(dep)
    innermost = [var for var in dep.ranges if dep.index.coeff(var) == 1]
    if innermost and V.graph.sizevars.statically_known_equals(
        dep.ranges[innermost[0]], columns
    ):
        return vector
    # One loop over rows and columns: a row begins anywhere where the next one does.
    return largest_divisor(columns, vector)


def row_vectors(
    attributes: Any, signature: Sequence[Any], features: SIMDKernelFeatures
) -> None:
    """
    Lower what ``attributes`` say of the addresses of what every row reads, so that a
    thread has no more columns of it than of the rows, which may begin anywhere.
    """
    numel, rnumel = features.numel, features.reduction_numel
    whole = accesses(features, numel * rnumel)
    columns = min(
        (adjacent_columns(dep, rnumel) for deps in whole.values() for dep in deps),
        default=0,
    )
    shared = accesses(features, rnumel)
    limits = {
        arg.buffer: columns * arg.dtype.itemsize
        for arg in signature
        if isinstance(arg, TensorArg) and arg.buffer in shared.keys() - whole.keys()
    }
    narrower = {name: size for name, size in limits.items() if 0 < size < VECTOR_BYTES}
    limit_alignment(attributes, signature, narrower)
