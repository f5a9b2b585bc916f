"""
What to launch a mix-order kernel with where its configuration does not fit.

Its one configuration comes from a model of what the kernel keeps in shared memory. The
driver has the last word on that, when the kernel is loaded; a model that was wrong
must cost time, not the training run.
"""

from __future__ import annotations

import copy
from typing import Any, Optional, TYPE_CHECKING


if TYPE_CHECKING:
    from .triton_compat import Config


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
