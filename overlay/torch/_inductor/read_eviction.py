"""
What the L2 cache is to keep of what a persistent reduction reads.

A line of it is read once, so the policy of such a load should not matter, and upstream has none,
or, in 2.15, ``evict_first``. But what a kernel stores leaves the cache as well. Where it stores as
much as it reads, an H200 takes 0.98 of the time if what was read stays for longer, and 1.03 if it
goes first, in the geometric mean. Where it stores less, the latter is 1.04, and where it stores
nothing of a row, 0.98. Unaligned rows gain by neither.

What some rows share, as a bias that the scores of each batch have, is read again when it is the
next batch's turn. Upstream's hint is to keep that, and it goes if the rows beside it are to stay:
of 1 to 16 MiB, that takes 1.02 of the time, and up to 1.12.

Of fewer bytes the cache has some left for the kernel that is next, which is upstream's to say.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Union

import sympy

from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from .device_model import DeviceModel
from .row_accesses import (
    bytes_of_row,
    loaded,
    moves_along_rows,
    reads_across_rows,
    SCANS_AND_SORTS,
    unaligned_bytes,
)
from .runtime.hints import DeviceProperties, ReductionHint
from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.simd_kernel_features import SIMDKernelFeatures
    from .codegen.triton import BlockDescriptorOptions, IndexingOptions, TritonKernel
    from .dependencies import MemoryDep


KEPT = ", eviction_policy='evict_last'"
DROPPED = ", eviction_policy='evict_first'"
# Upstream's, of a load that is the last of its buffer or not: which is known later.
UNDECIDED = "<EP>"
# Bytes that are stored for one that is read, from which on it is as much. All kernels that were
# measured have 1, less what rows share, or up to 2 / 3.
AS_MUCH = 3 / 4


def eviction_policy(
    kernel: TritonKernel,
    name: str,
    indexing: Union[IndexingOptions, BlockDescriptorOptions],
    policy: str,
) -> str:
    """The hint of a load of the buffer ``name``, for which ``policy`` is what upstream has."""
    if kernel.mix_order_reduction:
        return kernel.eviction_policy(indexing, policy)
    if not (reads_whole_lines(kernel) and reads_once(kernel, name, indexing)):
        return policy
    features, hint = kernel.features, V.graph.sizevars.optimization_hint
    moved = features.memory_stats().persistent
    read, stored = hint(moved.reads.bytes), hint(moved.writes.bytes)
    device = DeviceModel.of(
        DeviceProperties.create(V.graph.get_current_device_or_throw())
    )
    if not 0 < device.l2_passed * device.l2_bytes <= read + stored:
        return policy
    whole_vectors = is_tile(kernel) or not unaligned_bytes(features)
    if stored >= AS_MUCH * read and whole_vectors:
        return policy if shares_in_batches(features, device) else KEPT
    if bytes_of_row(moved.writes.dim[-1]):
        return "" if UNDECIDED in policy else policy
    return DROPPED if whole_vectors and not is_tile(kernel) else policy


def reads_whole_lines(kernel: TritonKernel) -> bool:
    """Whether no two programs of a persistent reduction read of a line, but at the ends of rows."""
    features = kernel.features
    if not (kernel.inside_reduction and kernel.persistent_reduction):
        return False
    if is_tile(kernel):
        return True
    return (
        features.get_reduction_hint(kernel.tiling_scores) == ReductionHint.INNER
        and not reads_across_rows(features)
        and not any(map(features.contains_op, SCANS_AND_SORTS))
    )


def reads_once(
    kernel: TritonKernel,
    name: str,
    indexing: Union[IndexingOptions, BlockDescriptorOptions],
) -> bool:
    """
    Whether a load has adjacent elements, and others for each row and for each column: not those
    that rows share, or windows that overlap.
    """
    from .codegen.triton import IndexingOptions  # which imports this

    # a block pointer's has no index
    if not isinstance(indexing, IndexingOptions) or indexing.has_indirect():
        return False
    index, elements = indexing.index, kernel.features.numel * kernel.features.reduction_numel
    return (
        not index.has(FloorDiv, ModularIndexing)
        and 1 in kernel.get_strides_of_load(index).values()
        and not kernel.is_broadcasted(index)
        and V.graph.sizevars.statically_known_leq(elements, V.graph.get_numel(name))
    )


def shares_in_batches(features: SIMDKernelFeatures, device: DeviceModel) -> bool:
    """Whether it reads rows again for other rows, after more bytes than an SM has shared memory,
    which is its L1 cache."""
    sizevars = V.graph.sizevars
    for dep in loaded(features):
        if dep.is_indirect() or not moves_along_rows(features, dep):
            continue
        numel = batch_numel(dep)
        read = sizevars.optimization_hint(numel) * V.graph.get_dtype(dep.name).itemsize
        several = sizevars.statically_known_gt(numel, features.reduction_numel)
        if several and read > device.shared_memory_kib * 1024:
            return True
    return False


def batch_numel(dep: MemoryDep) -> sympy.Expr:
    """The elements that the inner variables of ``dep`` read for each value of the outermost one
    that they do not depend on; 0 where there is none."""
    used = dep.index.free_symbols
    sizes = itertools.dropwhile(lambda each: each[0] in used, dep.ranges.items())
    inner = [size for var, size in sizes if var in used]
    return sympy_product(inner) if inner else sympy.S.Zero


def is_tile(kernel: TritonKernel) -> bool:
    """Whether it is a tile of a block reduction."""
    return bool(getattr(kernel, "tile_in_reduction", None))  # of a BlockReductionKernel
