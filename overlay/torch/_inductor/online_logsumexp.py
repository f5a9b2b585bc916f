"""
A logsumexp as an online softmax.

What it is decomposed to has a maximum, and a sum of exponentials of what is less than that
by it, or than zero, where the maximum is infinite. So it is a loop over the row for each.
Of a softmax both are one loop. The sum by an infinite maximum is NaN or nothing, and the
result is that maximum, which can be chosen at the end, for a row at a time.
"""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
from torch._prims_common import get_computation_dtype

from . import config


def online_logsumexp(
    x: torch.Tensor, dims: Union[int, list[int]], keepdim: bool
) -> Optional[torch.Tensor]:
    """
    Of ``x`` over one dimension, as the pattern of an online softmax has its maximum and
    its sum; None of anything else, and where there is no kernel of that.
    """
    dims = [dims] if isinstance(dims, int) else dims
    if (
        not config.online_softmax
        or x.device.type != "cuda"
        or config.cuda_backend != "triton"
        or not x.is_floating_point()
        or len(dims) != 1
        or x.ndim == 0
        or x.numel() == 0
    ):
        return None
    dim = dims[0] % x.ndim  # as that of a cross entropy
    # of 16 bits in float32, as a cross entropy's, which may be of the same tensor
    wide = x.to(get_computation_dtype(x.dtype))
    most = wide.amax(dim, keepdim=True)
    total = (wide - most).exp().sum(dim, keepdim=True)
    result = torch.where(most.abs() == math.inf, most, total.log() + most).to(x.dtype)
    return result if keepdim else result.squeeze(dim)
