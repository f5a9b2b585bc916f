"""Training steps of a Llama-style and a GPT-2-style stack of blocks, with random weights.

Widths are those of public models (Llama 3 8B, GPT-2 small); the stacks are cut short, since a
block repeats itself and so do its kernels. Shapes are (batch, sequence).
"""

import torch
import torch.nn.functional as F
from torch import nn

from graft.cases import Case

LLAMA_SIZES = {
    "dim": 4096,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14336,
    "layers": 2,
    "vocab": 32000,
}
GPT2_SIZES = {"dim": 768, "heads": 12, "layers": 6, "vocab": 50304, "context": 1024}


class RMSNorm(nn.Module):
    """RMSNorm with a weight, in fp32, as Llama computes it."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * x32.type_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def _rotate(self, x, cos, sin):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def forward(self, x, cos, sin):
        batch, length, dim = x.shape
        h = self.attention_norm(x)
        q = self.q(h).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = self._rotate(q, cos, sin).type_as(v), self._rotate(k, cos, sin).type_as(v)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden, layers, vocab):
        super().__init__()
        self.head_dim = dim // heads
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        steps = torch.arange(0, self.head_dim, 2, device=tokens.device, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32),
            500000.0 ** (-steps / self.head_dim),
        )
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class GPT2Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, dim, heads, layers, vocab, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(GPT2Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tokens(vocab):
    def inputs(shape, dtype, device):
        return tuple(torch.randint(0, vocab, shape, device=device) for _ in range(2))

    return inputs


def step(model, tokens, targets):
    """Mean cross entropy of the next token, under bf16 autocast."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def llama(device):
    with torch.device(device):
        return Llama(**LLAMA_SIZES)


def gpt2(device):
    with torch.device(device):
        return GPT2(**GPT2_SIZES)


CASES = [
    Case(
        "llama_step",
        "training step of 2 blocks of Llama 3 8B's width, bf16 autocast",
        step,
        _tokens(LLAMA_SIZES["vocab"]),
        {"default": [(4, 2048)]},
        ("bf16",),
        model=llama,
    ),
    Case(
        "gpt2_step",
        "training step of 6 blocks of GPT-2 small's width, bf16 autocast",
        step,
        _tokens(GPT2_SIZES["vocab"]),
        {"default": [(16, 1024)]},
        ("bf16",),
        model=gpt2,
    ),
]
