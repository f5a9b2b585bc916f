"""Backward of LayerNorm, as AOTAutograd hands it to Inductor."""

import torch

from graft.bench.shapes import NORMS14
from graft.cases import Case, numel


def layer_norm_backward(x, dy, weight, bias, mean, rstd):
    """dx `[xnumel, rnumel]`, dweight and dbias `[rnumel]`; `mean`, `rstd` `[xnumel, 1]` in fp32."""
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, [x.shape[-1]], mean, rstd, weight, bias, [True, True, True]
    )


def inputs(shape, dtype, device):
    x, dy = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.randn(shape[1], dtype=dtype, device=device) for _ in range(2))
    mean = torch.randn(shape[0], 1, dtype=torch.float32, device=device)
    rstd = torch.rand(shape[0], 1, dtype=torch.float32, device=device)
    return x, dy, weight, bias, mean, rstd


def bytes_moved(shape, dtype):
    """x, dy and dx, the weight, its gradient and the bias's, once each; mean and rstd in fp32."""
    rows, columns = shape
    elements = 3 * numel(shape) + 3 * columns
    return elements * dtype.itemsize + 2 * rows * torch.float32.itemsize


CASES = [
    Case(
        name="layer_norm_backward",
        summary="LayerNorm backward: dx, dweight and dbias",
        fn=layer_norm_backward,
        inputs=inputs,
        shapes={"default": [(32768, 768)], "norms14": NORMS14},
        bytes_moved=bytes_moved,
    )
]
