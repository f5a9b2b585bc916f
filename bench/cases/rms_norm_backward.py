"""Backward of RMSNorm, as AOTAutograd hands it to Inductor."""

import torch

from graft.bench.shapes import NORMS14
from graft.cases import Case, numel


def rms_norm_backward(x, dy, weight, rstd):
    """dx `[xnumel, rnumel]` and dweight `[rnumel]` of RMSNorm; `rstd` `[xnumel, 1]` in fp32."""
    return torch.ops.aten._fused_rms_norm_backward(dy, x, [x.shape[-1]], rstd, weight, [True, True])


def inputs(shape, dtype, device):
    x, dy = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(shape[1], dtype=dtype, device=device)
    rstd = torch.rand(shape[0], 1, dtype=torch.float32, device=device)
    return x, dy, weight, rstd


def bytes_moved(shape, dtype):
    """x, dy and dx, and the weight and its gradient, once each; rstd in fp32."""
    rows, columns = shape
    elements = 3 * numel(shape) + 2 * columns
    return elements * dtype.itemsize + rows * torch.float32.itemsize


CASES = [
    Case(
        name="rms_norm_backward",
        summary="RMSNorm backward: dx and dweight",
        fn=rms_norm_backward,
        inputs=inputs,
        shapes={"default": [(32768, 768)], "norms14": NORMS14},
        bytes_moved=bytes_moved,
    )
]
