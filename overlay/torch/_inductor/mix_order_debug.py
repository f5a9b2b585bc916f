"""
Options of mix-order reduction that its tests and its sweeps turn, and nobody else.

They are the entries of the dictionary ``torch._inductor.config.triton.mix_order_reduction_debug``;
what is not in it is as it is here. Like all of the configuration, they are a part of the keys of
Inductor's caches. What a user would turn is a name of its own in ``config.py``.
"""

from __future__ import annotations

import dataclasses

from . import config


@dataclasses.dataclass(frozen=True)
class DebugOptions:
    """The name, the type and the default of each option."""

    # Reductions over the rows and over the columns of a square tensor are of mixed orders
    # too, and are never fused into a loop of one order. False: as if they were not, since
    # their loops are the same.
    square: bool = True
    # amax and amin over the rows can be a kernel's partial accumulators, as sum and prod
    # are.
    extrema: bool = True
    # Split the rows over a fixed number of programs, a few for each SM, with a
    # software-pipelined loop over the rows of each. False, or where
    # mix_order_reduction_split_size is set: a program takes that many rows. Not on XPU and
    # ROCm, where it has not been measured.
    persistent_row_split: bool = True
    # Where a kernel reads or writes rows of types of different widths, let a thread load as
    # many columns of each as 16 bytes hold of the widest. False: as many as they hold of the
    # narrowest, which the others then load in pieces.
    even_vectors: bool = True
    # Load what every row reads as a tile, once, so that it has the layout of the tiles that
    # it is computed with. False: as one row, in its own layout.
    expand_row_invariants: bool = True
    # Let no tile have more rows than a kernel is launched with, autotuned or not, so that
    # rows of which there is a multiple of that many are not masked. False: only a multiple
    # of the largest block that there is goes without.
    bound_tiles: bool = True
    # Deal the tiles of rows out to the programs in turn, so that what is loaded at a time
    # adjoins in memory. False: each program has one run of rows.
    deal_tiles: bool = True
    # Tell ptxas that a thread may have all registers that there are, where it is predicted
    # to need more, or loads its rows twice for want of them. False: where it does need more,
    # ptxas gives it as few as 32, and spills all the more.
    all_registers: bool = True
    # Tell ptxas how many registers a thread may have: so many that all programs that are to
    # share a multiprocessor fit. False: where it takes a few more, fewer are there at a time,
    # and where it takes fewer, it spills, or loads later.
    share_registers: bool = True
    # Load a value of a half type of which there is one a row, such as a norm's statistic,
    # with the four bytes that it is in, which can be copied while the tile before is
    # computed. False: each tile waits for its own.
    load_words: bool = True
    # Fetch the rows of the next tile into the L2 cache while one is computed, where they are
    # not copied asynchronously, by an instruction that GPUs of compute capability 9.0 and
    # more have. False: memory waits for their loads.
    prefetch_rows: bool = True
    # Fetch rows as above where an asynchronous copy would have fewer bytes than this, since
    # they are aligned by no more. 4, which is the least: rows that can be copied are.
    min_copy_bytes: int = 16
    # Keep a row that takes more registers than there are, and spill some, where that is
    # predicted to take less time than to load the row twice. False: every row that does not
    # fit is loaded twice.
    keep_rows: bool = True
    # Leave the columns that rows are padded by out of the accumulators before they are
    # stored, so that they take no registers. False: as far as ptxas finds out from the
    # store's mask.
    drop_padding: bool = True
    # Split few rows over a half or a quarter of the programs where their partial
    # accumulators would take longer than more tiles a program do. False: as many programs as
    # run at a time, whatever each leaves to the final reduction.
    fewer_programs: bool = True
    # Do not make a kernel, or absorb another node into it, that is predicted to spill more
    # registers than pay in every configuration that it would be launched with. The
    # prediction is made from the nodes' loop bodies, without compiling.
    register_pressure: bool = True


_DEFAULTS = DebugOptions()


def debug_options() -> DebugOptions:
    """
    The options as they are set. Raises ValueError for a name that is no option, or a value
    of another type than the default.
    """
    entries = config.triton.mix_order_reduction_debug
    if not entries:
        return _DEFAULTS
    defaults = {each.name: each.default for each in dataclasses.fields(DebugOptions)}
    for name, value in entries.items():
        if name not in defaults:
            raise ValueError(
                f"triton.mix_order_reduction_debug has no {name!r}; "
                f"its options are {', '.join(defaults)}"
            )
        if type(value) is not type(defaults[name]):
            raise ValueError(
                f"triton.mix_order_reduction_debug: {name} is {value!r}, and should be of "
                f"type {type(defaults[name]).__name__}"
            )
    return dataclasses.replace(_DEFAULTS, **entries)
