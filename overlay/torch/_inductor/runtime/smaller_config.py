"""
What to launch a mix-order kernel with where its configuration does not fit.

Its one configuration comes from a model of what the kernel keeps in shared memory and in
registers. The driver has the last word on the one, when the kernel is loaded, and ptxas on
the other; a model that was wrong must cost time, not the training run, and no spills
where half the rows have none.
"""

from __future__ import annotations

import copy
from typing import Any, Optional, TYPE_CHECKING

from .launch_plan import LaunchPlan
from .triton_compat import OutOfResources, PTXASError


if TYPE_CHECKING:
    from .triton_compat import Config
    from .triton_heuristics import CachingAutotuner


def smaller_config(config: Config, inductor_meta: dict[str, Any]) -> Optional[Config]:
    """
    The configuration that needs less shared memory than ``config`` and is next to it:
    with a stage less, or of one stage with half the rows, as far as tensor descriptors
    allow; None when there is none. The number of programs is the kernel's, and does not
    depend on either.
    """
    least_rows = inductor_meta.get("tma_min_block_sizes", {}).get("XBLOCK", 1)
    smaller = copy.copy(config)
    smaller.kwargs = {**config.kwargs}
    for name, fewer, least in (
        ("NUM_STAGES", config.kwargs["NUM_STAGES"] - 1, 1),
        ("XBLOCK", config.kwargs["XBLOCK"] // 2, least_rows),
    ):
        if fewer >= least:
            smaller.kwargs[name] = fewer
            return smaller
    return None


def fewer_rows(config: Config, inductor_meta: dict[str, Any]) -> Optional[Config]:
    """``config`` with half the rows; None for a row, and for another kernel's."""
    if not LaunchPlan.of(inductor_meta).num_programs:
        return None
    one_stage = copy.copy(config)
    one_stage.kwargs = {**config.kwargs, "NUM_STAGES": 1}
    fewer = smaller_config(one_stage, inductor_meta)
    if fewer is not None:
        fewer.kwargs["NUM_STAGES"] = config.kwargs["NUM_STAGES"]
    return fewer


def compile_again(tuner: CachingAutotuner, config: Config) -> Any:
    """The kernel with another configuration, in the process that launches it."""
    if tuner.fn.fn is None:
        tuner.fn = tuner._reload_kernel().fn  # type: ignore[misc]
    return tuner._precompile_config(config)


def spill_less(tuner: CachingAutotuner, launchers: list[Any]) -> list[Any]:
    """
    ``launchers``, or, where a mix-order kernel of one configuration spills, the launcher
    of half the rows if that spills less. Autotuning has it among its configurations.
    """
    (result, *others), (launcher, *_) = tuner.compile_results, launchers
    config = None if others else fewer_rows(result.config, tuner.inductor_meta)
    if config is None or not launcher.n_spills:
        return launchers
    try:
        result = compile_again(tuner, config)
        smaller = result.make_launcher()
    except (OutOfResources, PTXASError):
        return launchers
    if smaller.n_spills >= launcher.n_spills:
        return launchers
    tuner.compile_results = [result]
    return [smaller]
