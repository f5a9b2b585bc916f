"""
What to launch a mix-order kernel with where its configuration does not fit.

Its one configuration comes from a model of what the kernel keeps in shared memory. The
driver has the last word on that, when the kernel is loaded; a model that was wrong
must cost time, not the training run.
"""

from __future__ import annotations

import copy
from typing import Optional, TYPE_CHECKING


if TYPE_CHECKING:
    from .triton_compat import Config


def smaller_config(config: Config) -> Optional[Config]:
    """
    The configuration that needs less shared memory than ``config`` and is next to it:
    with a stage less, or of one stage with half the rows; None when there is none. The
    number of programs is the kernel's, and does not depend on either.
    """
    smaller = copy.copy(config)
    smaller.kwargs = {**config.kwargs}
    for name, fewer in (
        ("NUM_STAGES", config.kwargs["NUM_STAGES"] - 1),
        ("XBLOCK", config.kwargs["XBLOCK"] // 2),
    ):
        if fewer > 0:
            smaller.kwargs[name] = fewer
            return smaller
    return None
