"""Norms and softmaxes along the channels of [B, C, H, W], or the features of [N, C].

Adjacent elements are of adjacent rows, the pixels. Results lie as the inputs do, or are tokens,
[B, H * W, C].
"""

import torch
import torch.nn.functional as F

from graft.cases import Case
from graft.cases.scaled import matrix, two

SHAPES = {
    "default": [(64, 768, 14, 14)],
    # of networks for images, at small batches too, and sizes that nobody has
    "suite": [
        (64, 768, 14, 14),
        (24, 768, 14, 14),
        (128, 384, 14, 14),
        (8, 320, 64, 64),
        (16, 256, 56, 56),
        (64, 96, 56, 56),
        (8, 150, 128, 128),
        (4, 512, 32, 32),
        (48, 1024, 8, 8),
        (2, 640, 48, 48),
        (8, 768, 24, 24),
        (3, 832, 33, 33),
        (24, 512, 17, 17),
        (16, 768, 32, 32),
        (1, 1000, 64, 64),
        (12, 192, 75, 50),
        (300, 200, 15, 10),
        (48, 500, 25, 40),
    ],
}
FEATURES = {
    "default": [(1000, 4096)],
    "suite": [
        (1000, 4096),
        (1024, 8192),
        (512, 2500),
        (256, 6000),
        (128, 3072),
        (640, 2304),
        (300, 3001),
        (768, 5120),
        (2048, 4096),
    ],
}


def _with_rows(tensors, rows):
    """`tensors`, and so many weights of a channel each."""

    def make(shape, dtype, device):
        weights = (torch.randn(shape[1], device=device) for _ in range(rows))
        return (*tensors(shape, dtype, device), *weights)

    return make


def _layer_norm(x, weight, bias):
    return F.layer_norm(x.float(), weight.shape, weight, bias).to(x.dtype)


def channel_softmax(x):
    return torch.softmax(x.float(), 1).to(x.dtype)


def channel_normalize(x):
    """Of length one at each pixel."""
    return F.normalize(x, dim=1)


def channel_rms_norm(x, weight):
    scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)
    return (x * scale * weight[:, None, None]).to(x.dtype)


def channel_layer_norm(x, weight, bias):
    """As ConvNeXt has it: channels last for the norm, and back."""
    return _layer_norm(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def tokens_layer_norm(x, weight, bias):
    return _layer_norm(x.flatten(2).transpose(1, 2), weight, bias)


def residual_tokens_norm(x, y, weight, bias):
    """A sum that is kept, and its norm as tokens, as an MLP-Mixer has them."""
    z = x + y
    return z, _layer_norm(z.flatten(2).transpose(1, 2), weight, bias)


def tokens_softmax(x, y):
    return torch.softmax((x + y).flatten(2).transpose(1, 2).float(), -1).to(x.dtype)


def feature_norm(x, weight, bias):
    """The batch norm of [N, C]."""
    return F.batch_norm(x.float(), None, None, weight, bias, training=True).to(x.dtype)


def feature_softmax(x):
    """Over the batch, as a contrastive loss has it in one of its directions."""
    return torch.softmax(x.float(), 0).to(x.dtype)


CASES = [
    Case(fn.__name__, title, fn, make, shapes, ("bf16", "fp32"))
    for fn, title, make, shapes in (
        (channel_softmax, "softmax over channels", matrix, SHAPES),
        (channel_normalize, "channels of length one", matrix, SHAPES),
        (channel_rms_norm, "RMSNorm over channels", _with_rows(matrix, 1), SHAPES),
        (channel_layer_norm, "LayerNorm over channels, and back", _with_rows(matrix, 2), SHAPES),
        (tokens_layer_norm, "LayerNorm of tokens from channels", _with_rows(matrix, 2), SHAPES),
        (residual_tokens_norm, "a sum, and its tokens' LayerNorm", _with_rows(two, 2), SHAPES),
        (tokens_softmax, "softmax of tokens from channels", two, SHAPES),
        (feature_norm, "batch norm of [N, C]", _with_rows(matrix, 2), FEATURES),
        (feature_softmax, "softmax over the batch of [N, C]", matrix, FEATURES),
    )
]
