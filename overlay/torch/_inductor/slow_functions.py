"""
Whether a small tensor of slow functions is worth a kernel of its own.

What is pointwise is computed where it is read, again for each element of a tensor that
it is broadcast to. For most functions that is cheaper than to load it. But the cosines
of rotary embeddings, [tokens, channels], are read for each batch and head, and a cosine
with the power that its angle is made of takes a hundred instructions and more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from . import config
from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from .ir import Loops


# Those that take 30 instructions or more on a GPU, many with branches.
SLOW_FUNCTIONS = OrderedSet(
    [
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh"),
        *("cos", "cosh", "sin", "sinh", "tan", "tanh"),
        *("digamma", "erfc", "erfcx", "erfinv", "igamma", "igammac", "lgamma", "ndtri"),
        *("polygamma", "pow", "zeta"),
    ]
)
# How often an element is computed, at least: to store one takes as long as to load some.
MIN_USES = 8
# Elements that are computed, at least: fewer take as long as to launch a kernel, 2 to 3 us.
MIN_COMPUTED = 1 << 22


def is_worth_a_kernel(data: Loops, uses: int) -> bool:
    """Whether ``data``, each element of which is computed ``uses`` times, should be once."""
    if not config.realize_slow_functions or uses < MIN_USES:
        return False
    numel = V.graph.sizevars.optimization_hint(sympy_product(data.get_size()), fallback=0)
    return numel * uses >= MIN_COMPUTED and any(
        name in SLOW_FUNCTIONS for name in data.inner_fn_opcount().used_ops
    )
