"""Training steps of ConvNeXt and ConvNeXt-V2: convolutions, norms and products of channels.

Between convolutions that want channels last, a block permutes to [batch, height, width, channels]
for its norm and its two products, and back. timm's layers, of its tiny models' widths.
"""

import torch
import torch.nn.functional as F
from torch import nn

from graft.cases import Case

WIDTHS = (96, 192, 384, 768)
CLASSES = 1000


class ChannelNorm(nn.LayerNorm):
    """Over the channels of [batch, channels, height, width]."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """Global response normalisation of [batch, height, width, channels]."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        norm = x.norm(p=2, dim=(1, 2), keepdim=True)
        norm = norm / (norm.mean(dim=-1, keepdim=True) + self.eps)
        return x + torch.addcmul(self.bias, self.weight, x * norm)


class Block(nn.Module):
    def __init__(self, dim, response_norm):
        super().__init__()
        self.conv_dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.grn = ResponseNorm(4 * dim) if response_norm else nn.Identity()
        self.fc2 = nn.Linear(4 * dim, dim)
        self.gamma = None if response_norm else nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x):
        y = self.norm(self.conv_dw(x).permute(0, 2, 3, 1))
        y = self.fc2(self.grn(F.gelu(self.fc1(y)))).permute(0, 3, 1, 2)
        return x + (y if self.gamma is None else y * self.gamma.reshape(1, -1, 1, 1))


class Model(nn.Module):
    def __init__(self, response_norm, depth=1):
        super().__init__()
        first = WIDTHS[0]
        layers = [nn.Conv2d(3, first, 4, stride=4), ChannelNorm(first, eps=1e-6)]
        for before, dim in zip((first, *WIDTHS), WIDTHS, strict=False):
            if before != dim:
                layers += [ChannelNorm(before, eps=1e-6), nn.Conv2d(before, dim, 2, stride=2)]
            layers += [Block(dim, response_norm) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = ChannelNorm(WIDTHS[-1], eps=1e-6)
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, x, y):
        x = self.layers(x).mean((2, 3), keepdim=True)
        return F.cross_entropy(self.head(self.norm(x).flatten(1)), y)


def _model(response_norm):
    def model(device):
        with device:
            return Model(response_norm)

    return model


def step(model, x, y):
    """The loss of images `x` `[batch, 3, height, width]` of classes `y` `[batch]`, in autocast."""
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        return model(x, y)


def inputs(shape, dtype, device):
    batch, size = shape
    images = torch.randn((batch, 3, size, size), device=device)
    return images, torch.randint(0, CLASSES, (batch,), device=device)


CASES = [
    Case(
        name=name,
        summary=f"training step of {title}, a block a stage",
        fn=step,
        inputs=inputs,
        shapes={"default": [(96, 224)]},
        dtypes=("bf16",),
        model=_model(response_norm),
    )
    for name, title, response_norm in (
        ("convnext_step", "ConvNeXt", False),
        ("convnext_v2_step", "ConvNeXt-V2", True),
    )
]
