"""A training step whose backward sums over columns many times a block.

The 11-block transformer of pytorch#179423 with weights on its RMSNorms, a scale for each channel on
both residual branches, and a learned mix, for each channel, of a block's input with the first
embedding. Mix-order kernels with many loads come of it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from graft.cases import Case

VOCABULARY = 4096


class Attention(nn.Module):
    def __init__(self, dim, num_heads=8, num_kv_heads=4):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = dim // num_heads
        self.c_q = nn.Linear(dim, dim, bias=False)
        self.c_k = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.c_v = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim)
        self.k_norm = nn.RMSNorm(self.head_dim)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        batch, length, dim = x.shape
        q = self.c_q(x).reshape(batch, length, self.num_heads, self.head_dim)
        k = self.c_k(x).reshape(batch, length, self.num_kv_heads, self.head_dim)
        v = self.c_v(x).reshape(batch, length, self.num_kv_heads, self.head_dim)
        q = self.q_norm(q).transpose(1, 2)
        repeats = self.num_heads // self.num_kv_heads
        k = self.k_norm(k).transpose(1, 2).repeat_interleave(repeats, dim=1)
        v = v.transpose(1, 2).repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, dim))


class MLP(nn.Module):
    def __init__(self, dim, mult=4):
        super().__init__()
        self.fc = nn.Linear(dim, mult * dim, bias=False)
        self.proj = nn.Linear(mult * dim, dim, bias=False)

    def forward(self, x):
        return self.proj(F.leaky_relu(self.fc(x), negative_slope=0.5).square())


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn, self.mlp = Attention(dim), MLP(dim)
        self.attn_scale = nn.Parameter(torch.ones(dim))
        self.mlp_scale = nn.Parameter(torch.ones(dim))
        self.mix = nn.Parameter(torch.stack([torch.ones(dim), torch.zeros(dim)]))

    def forward(self, x, first):
        x = self.mix[0] * x + self.mix[1] * first
        x = x + self.attn_scale * self.attn(self.attn_norm(x))
        return x + self.mlp_scale * self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, dim=512, num_layers=11):
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, dim)
        self.emb_norm = nn.RMSNorm(dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, x, y):
        first = h = self.emb_norm(self.tok_emb(x))
        for block in self.blocks:
            h = block(h, first)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def model(device):
    with device:
        return Model().bfloat16()


def step(model, x, y):
    """The loss of tokens `x` `[batch, length]` and targets `y`, under bf16 autocast."""
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        return model(x, y)


def inputs(shape, dtype, device):
    return tuple(torch.randint(0, VOCABULARY, shape, device=device) for _ in range(2))


CASES = [
    Case(
        name="scaled_residual",
        summary="training step of an 11-block transformer with scaled residuals and a learned mix",
        fn=step,
        inputs=inputs,
        shapes={"default": [(48, 2048)]},
        dtypes=("bf16",),
        model=model,
    )
]
