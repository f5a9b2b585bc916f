"""
The Triton kernel of a mix-order reduction.

It reduces each row of a ``[xnumel, rnumel]`` tensor, and keeps a partial accumulator of
``rnumel`` elements for each reduction over the rows. Its body is a loop over tiles of rows;
after that its partial accumulators are stored as a row each of the workspace, which a final
reduction reads. What is decided of it is decided elsewhere: this says what is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Optional, TYPE_CHECKING, Union
from unittest import mock

import sympy

import torch
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import CeilDiv

from .. import config, ir
from ..dependencies import MemoryDep
from ..mix_order_debug import debug_options
from ..mix_order_prefetch import codegen_prefetch, note_rows
from ..mix_order_reduction import (
    accumulate_dtype,
    expand_row_invariant,
    is_row_invariant,
    partial_accumulate_value,
    unpadded_accumulator,
)
from ..mix_order_row_loop import (
    row_loop,
    row_pass_eviction_policy,
    RowSplit,
    takes_turns,
)
from ..mix_order_row_values import codegen_word_load, loads_words
from ..upstream_names import ASSERTS_END_STAGES
from ..utils import IndentedBuffer, triton_type
from ..vector_width import even_vectors, row_vectors
from ..virtualized import V
from .mix_order import FinalReductionFeatures
from .simd import PartialAccumulate
from .triton import (
    constant_repr,
    get_triton_reduction_function,
    IndexingOptions,
    TritonKernel,
)


if TYPE_CHECKING:
    from .simd import IterationRangesRoot
    from .simd_kernel_features import SIMDKernelFeatures
    from .triton import BlockDescriptorOptions, TritonCSEVariable


def choose_kernel(
    kernel_type: type[TritonKernel],
    features: SIMDKernelFeatures,
    kwargs: dict[str, Any],
) -> type[TritonKernel]:
    """
    The type of the kernel of ``features``: ``kernel_type``, but for a mix-order reduction.
    ``kwargs`` of a final reduction get what that decides.
    """
    if isinstance(features, FinalReductionFeatures):
        kwargs.update(features.kernel_kwargs)
    return MixOrderKernel if kwargs.get("mix_order_reduction") else kernel_type


def stores_indirectly(features: SIMDKernelFeatures) -> bool:
    """Whether a kernel stores, or adds, by an index that it loads or computes."""
    return any(
        write.is_indirect()
        for node in features.scheduler_nodes()
        for write in node.read_writes.writes
        if isinstance(write, MemoryDep)
    )


@dataclasses.dataclass
class MixOrderPartial(PartialAccumulate):
    """``dtype``: of the accumulator, and of the workspace."""

    dtype: torch.dtype


class MixOrderKernel(TritonKernel):
    """A kernel of programs of ``split_size`` rows each, or as many as a RowSplit says."""

    def __init__(
        self,
        *args: Any,
        split_size: Union[int, RowSplit],
        **kwargs: Any,
    ) -> None:
        self.row_split = split_size if isinstance(split_size, RowSplit) else None
        # (condition, the rest of its assertion): the variable that says whether all rows meet it
        self.noted_bounds: dict[tuple[str, str], str] = {}
        # what of an iteration was written out before its rows' reductions were known
        self.earlier_row_passes = IndentedBuffer()
        self.row_pass = 0
        # where rows that it fetches ahead begin, and bytes of their elements
        self.prefetched_rows: dict[str, int] = {}
        kwargs["override_cooperative_reduction"] = False
        super().__init__(*args, **kwargs)
        if self.row_split is None:
            self.rsplit_size = split_size

    @property
    def num_partials(self) -> Union[int, sympy.Expr]:
        """Programs, and rows of the workspace for each reduction."""
        if self.row_split is not None:
            return self.row_split.num_programs
        return CeilDiv(self.features.numel, self.rsplit_size)

    def partials_workspace(self) -> str:
        """Adds the workspace of the partial accumulators; its name."""
        (dtype,) = OrderedSet(p.dtype for p in self.saved_partial_accumulate)
        numel = len(self.saved_partial_accumulate) * self.numels["r0_"]
        _, name, offset = self.args.workspace(
            numel * self.num_partials, False, dtype=dtype
        )
        assert offset == 0, offset
        return name

    def partial_accumulate(
        self, name: str, reduction_type: str, val: Any, extra_meta: dict[str, Any]
    ) -> None:
        dtype = accumulate_dtype(V.graph.get_dtype(name))
        assert dtype is not None
        # what only partial accumulators read need not be stored
        self.store_buffer_names.add(name)
        self.saved_partial_accumulate.append(
            MixOrderPartial(name, reduction_type, val, dtype)
        )

    def max_block(self, prefix: str) -> int:
        if self.row_split is not None and prefix == "x" and not self.fixed_config:
            return self.row_split.max_xblock
        return super().max_block(prefix)

    def codegen_static_numels(self, code: IndentedBuffer) -> None:
        super().codegen_static_numels(code)
        if self.row_split is not None:
            code.writeline(self.row_split.codegen_step())

    def iteration_ranges_codegen_header(
        self, entry: IterationRangesRoot, code: IndentedBuffer
    ) -> None:
        if entry.prefix != "x" or not takes_turns(self.row_split):
            super().iteration_ranges_codegen_header(entry, code)
            return
        # the first of its tiles, which adjoins those of other programs
        pid = self.iteration_ranges_get_pid(entry)
        rows = self.iteration_ranges_ranges_code(entry)
        code.writeline(f"xoffset = {pid} * XBLOCK")
        code.writeline(f"xindex = xoffset + {rows}")
        if self._has_constant_mask(entry):
            code.writeline(self.create_constant_mask(entry))

    def indexing(
        self, index: sympy.Expr, *, tma_compatibility_checker: Any = None, **kwargs: Any
    ) -> Union[IndexingOptions, BlockDescriptorOptions]:
        checker = tma_compatibility_checker
        indexing = super().indexing(
            index, tma_compatibility_checker=checker, **kwargs
        )
        is_load = checker is not None and not checker.for_store
        return expand_row_invariant(self, indexing) if is_load else indexing

    def get_load_buffer(
        self, indexing: Union[IndexingOptions, BlockDescriptorOptions]
    ) -> IndentedBuffer:
        buffer = super().get_load_buffer(indexing)
        if (
            buffer is self.loads
            and isinstance(indexing, IndexingOptions)
            and not (indexing.has_indirect() or indexing.has_tmpmask())
            and is_row_invariant(indexing)
            and (self.row_split is None or self.row_split.hoist)
        ):
            # the loop is over rows
            buffer = self.body
        # a row's value is good in all of its passes
        self.last_load_stays = buffer is self.body or not (
            indexing.has_rindex() or indexing.has_rmask()
        )
        return buffer

    def load(self, name: str, index: sympy.Expr) -> TritonCSEVariable:
        loaded = super().load(name, index)
        if self.last_load_stays:
            self.outside_loop_vars.add(loaded)
        return loaded

    def eviction_policy(
        self, indexing: Union[IndexingOptions, BlockDescriptorOptions], policy: str
    ) -> str:
        """Of a load of ``indexing``, for which ``policy`` is what other kernels have."""
        if (
            self.reloads_rows()
            and indexing.has_rindex()
            and self.get_load_buffer(indexing) is self.loads
        ):
            return row_pass_eviction_policy(self.row_pass, policy)
        return policy

    def row_load(
        self, line: str, name: str, pointer: str, indexing: IndexingOptions, hints: str
    ) -> str:
        """
        ``line``, which loads ``indexing`` of the buffer ``name``, which is ``pointer``, or
        another one for it. ``hints`` follow the mask.
        """
        if loads_words(self, name, indexing):
            line = codegen_word_load(self, name, pointer, indexing, hints)
        note_rows(self, pointer, name, indexing)
        return line

    def reloads_rows(self) -> bool:
        return self.row_split is not None and self.row_split.reload

    def disable_reduction(self) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def row_pass() -> Any:
            with super(MixOrderKernel, self).disable_reduction():
                yield
            self.end_row_pass()

        return row_pass()

    def end_row_pass(self) -> None:
        """A row's reductions are known, and what follows may depend on them."""
        if not self.reloads_rows() or not self.compute:
            return
        for code in (self.loads, self.compute, self.stores, self.post_loop_combine):
            self.earlier_row_passes.splice(code)
            code.clear()
        # Load and compute again, but for row statistics, what all rows share, and
        # what is in a buffer by now.
        keep = self.outside_loop_vars | self.cse.store_cache.values()
        self.cse.invalidate(OrderedSet(keep))
        self.row_pass += 1

    def _get_heuristic(self) -> str:
        # codegen_kernel asks when all that triton_meta says is there, and writes it then
        if self.triton_meta and self.row_split:
            self.limit_alignment(*self.triton_meta["configs"])
        return super()._get_heuristic()

    def limit_alignment(self, attributes: Any) -> None:
        """Lower what ``attributes`` say of the arguments, as far as fewer columns a thread
        are better."""
        _, _, signature, _ = self.args.python_argdefs()
        if debug_options().even_vectors:
            even_vectors(attributes, signature, self.features)
        if debug_options().expand_row_invariants:
            row_vectors(attributes, signature, self.features)

    def indirect_assert(
        self,
        var: Union[TritonCSEVariable, str],
        lower: Optional[str],
        upper: Optional[str],
        mask: Optional[Union[TritonCSEVariable, str]] = None,
    ) -> str:
        """
        The line that asserts the bounds of an index; or, of a row's in a loop that would lose its
        stages, the line that notes them. They are asserted after the loop, when what a row gathers
        was loaded, as it is where a loop with stages asserts. Nothing is stored by an index then.
        """
        line = super().indirect_assert(var, lower, upper, mask)
        row = self.cse.varname_map.get(str(var))
        if (
            not ASSERTS_END_STAGES
            or self.row_split is None
            or self.row_split.num_stages == 1
            or stores_indirectly(self.features)
            or row is None
            or [*map(str, row.shape or ())] != ["XBLOCK", "1"]
            or mask not in (None, "xmask")
        ):
            return line
        condition, text = line.removeprefix(f"{self.assert_function}(").split(', "')
        name = self.noted_bounds.setdefault(
            (condition, text), f"in_bounds{len(self.noted_bounds)}"
        )
        return f"{name} = {name} & ({condition})"

    def codegen_body(self) -> None:
        """Write the partial accumulators, the loop over rows that adds to them, stores."""
        row = (self.loads, self.compute, self.stores, self.post_loop_combine)
        pending = (self.indexing_code, *row, self.post_loop_store)
        if not any(pending):
            return
        assert self.persistent_reduction, "a mix-order kernel has whole rows"
        identities = [self._identity(p) for p in self.saved_partial_accumulate]
        accumulators = [
            self._codegen_accumulator(f"accum{i}", partial, identity)
            for i, (partial, identity) in enumerate(
                zip(self.saved_partial_accumulate, identities)
            )
        ]
        for name in self.noted_bounds.values():
            self.body.writeline(f"{name} = tl.full([XBLOCK, 1], True, tl.int1)")
        loop, step = row_loop(self.row_split)
        self.body.writelines(loop)
        with self.body.indent():
            if not self._has_constant_xmask():
                self.body.writeline("xmask = xindex < xnumel")
            self.body.splice(self.indexing_code)
            self.body.writeline(f"xindex += {step}")
            self.body.writelines(codegen_prefetch(self, step))
            self.body.splice(self.earlier_row_passes)
            # a row's result is final in each iteration
            for code in (*row, self.post_loop_store):
                self.body.splice(code)
            if config.triton.use_block_ptr or config.triton.use_tensor_descriptor:
                # they start at the tile's offset, everything else at xindex
                self.body.writeline(f"xoffset += {step}")
            for accumulator, partial, identity in zip(
                accumulators, self.saved_partial_accumulate, identities
            ):
                self._codegen_accumulate(accumulator, partial, identity)
        for (_, text), name in self.noted_bounds.items():
            self.body.writeline(f'{self.assert_function}({name}, "{text}')
        for i, (partial, identity) in enumerate(
            zip(self.saved_partial_accumulate, identities)
        ):
            self._codegen_whole_accumulator(f"accum{i}", partial, identity)
            row_of_workspace = f"(tl.program_id(0) + {i} * tl.num_programs(0))"
            self.body.writeline(
                f"tl.store(ws_ptr + {row_of_workspace} * r0_numel + r0_index, accum{i}, r0_mask)"
            )
        for code in pending:
            code.clear()

    def _identity(self, partial: MixOrderPartial) -> str:
        """What the accumulator of ``partial`` begins as, and what adds nothing to it."""
        value = ir.Reduction.default_accumulator(partial.reduction_type, partial.dtype)
        return self._map_tuple_or_scalar(constant_repr, value)

    @property
    def accumulates_tiles(self) -> bool:
        """Whether a partial accumulator is a whole tile until the loop ends."""
        return self.row_split is not None and self.row_split.accumulate_tiles

    def _codegen_accumulator(
        self, name: str, partial: MixOrderPartial, identity: str
    ) -> TritonCSEVariable:
        shape = ("1", "R0_BLOCK")
        full = f"tl.full([R0_BLOCK], {identity}, {triton_type(partial.dtype)})[None, :]"
        if self.accumulates_tiles:
            shape = ("XBLOCK", "R0_BLOCK")
            full = f"tl.full([XBLOCK, R0_BLOCK], {identity}, {triton_type(partial.dtype)})"
        self.body.writeline(f"{name} = {full}")
        return self.cse.namedvar(name, dtype=partial.dtype, shape=shape)

    def _codegen_accumulate(
        self, accumulator: TritonCSEVariable, partial: MixOrderPartial, identity: str
    ) -> None:
        """Add the tile of an iteration to ``accumulator``."""
        value = partial_accumulate_value(self, partial, identity)
        if not self.accumulates_tiles:
            reduce = get_triton_reduction_function(partial.reduction_type)
            value = self.cse.generate(
                self.body, f"{reduce}({value}, 0)", dtype=value.dtype, shape=("R0_BLOCK",)
            )
        combine = ir.get_reduction_combine_fn(partial.reduction_type, partial.dtype)
        with mock.patch.object(self, "compute", self.body):
            total = combine(accumulator, value)
        self.body.writeline(f"{accumulator} = {total}")

    def _codegen_whole_accumulator(
        self, name: str, partial: MixOrderPartial, identity: str
    ) -> None:
        """What is left to do for an accumulator after the loop, before it is stored."""
        self.body.writelines(unpadded_accumulator(self, name, identity))
        if self.accumulates_tiles:
            reduce = get_triton_reduction_function(partial.reduction_type)
            self.body.writeline(f"{name} = {reduce}({name}, 0)[None, :]")
