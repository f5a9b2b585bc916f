"""Backwards of norms as models have them, of many sizes: what register pressure is judged on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graft.cases import DTYPES

COLUMNS = (
    *(128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560),
    *(3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384),
)
# Rows that do not start at 16 bytes, of fp16 and bf16 or of any type.
UNALIGNED_COLUMNS = (130, 300, 1001, 1700, 2050, 3333, 4100, 5001, 7002, 9999, 12290)
# Enough to fill any GPU: a kernel does not depend on them otherwise.
ROWS = (8192, 32768)


@dataclass(frozen=True)
class Program:
    """A norm's backward on [rows, columns], with what models fuse into it.

    `sums` are extra sums over the rows: "product" of dy and one more tensor, "scaled" by a function
    of what is there, "output" of dx itself. `residuals` are gradients that are added to dx, each
    with a vector over the columns that mixes it where `mixed`. `dropout` is "mask" (saved) or
    "seed" (generated again). `copies` are further outputs, dx scaled by a vector. `gelu` is the
    approximation ("none" or "tanh") of a GELU between the norm and dy, whose backward is fused.
    """

    norm: str
    dtype: str
    saved_dtype: str
    output_dtype: str
    rows: int
    columns: int
    sums: tuple[str, ...] = ()
    residuals: int = 0
    mixed: bool = False
    dropout: str = ""
    copies: int = 0
    recomputed: bool = False
    gelu: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Program:
        """The program whose `asdict` was written as JSON, which has no tuples."""
        return cls(**{**fields, "sums": tuple(fields["sums"])})

    def specs(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each input, in the order in which `fn` takes them."""
        tile, vector, row = (self.rows, self.columns), (self.columns,), (self.rows, 1)
        dtype, saved = DTYPES[self.dtype], DTYPES[self.saved_dtype]
        specs = [(tile, dtype), (tile, saved), (vector, dtype)]
        specs += [(row, torch.float32)] * (0 if self.recomputed else 2)
        specs += [(tile, dtype)] if self.gelu else []
        specs += [(tile, torch.bool)] if self.dropout == "mask" else []
        specs += [((), torch.int64)] if self.dropout == "seed" else []
        for _ in range(self.residuals):
            specs += [(tile, dtype)] + ([(vector, dtype)] if self.mixed else [])
        specs += [(tile, dtype)] * self.sums.count("product")
        specs += [(vector, dtype)] * self.copies
        return specs

    def fn(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The computation."""
        take = iter(tensors)
        dy, x, weight = (next(take).float() for _ in range(3))
        if self.recomputed:
            mean = x.mean(-1, keepdim=True) if self.norm == "layer" else None
            centred = x if mean is None else x - mean
            rstd = (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        else:
            mean, rstd = next(take), next(take)
            centred = x - mean if self.norm == "layer" else x
        if self.gelu:
            dy = torch.ops.aten.gelu_backward(dy, next(take).float(), approximate=self.gelu)
        if self.dropout == "mask":
            dy = dy * next(take) * 1.25
        elif self.dropout == "seed":
            noise = torch.ops.prims.inductor_random.default(
                [self.rows, self.columns], next(take), "rand"
            )
            dy = dy * (noise > 0.2) * 1.25
        # the sums over rows must not wait for a row's statistic that is computed here
        seen = x if self.recomputed else centred * rstd
        xhat = centred * rstd
        wdy = dy * weight
        dx = wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)
        if self.norm == "layer":
            dx = dx - wdy.mean(-1, keepdim=True)
        dx = dx * rstd
        sums = [dy * seen] + ([dy] if self.norm == "layer" else [])
        for _ in range(self.residuals):
            residual = next(take).float()
            if self.mixed:
                scale = next(take).float()
                sums.append(residual * x)
                residual = residual * scale
            dx = dx + residual
        for i, kind in enumerate(self.sums):
            if kind == "product":
                sums.append(dy * next(take).float())
            else:
                sums.append(_FUNCTIONS[i % len(_FUNCTIONS)](dy, seen))
        output = DTYPES[self.output_dtype]
        results = [dx.to(output)]
        for _ in range(self.copies):
            results.append((dx * next(take).float()).to(output))
        return (*results, *(total.sum(0) for total in sums))


_FUNCTIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a * a,
    lambda a, b: b * b,
    lambda a, b: a.abs(),
    lambda a, b: a * b * b,
    lambda a, b: b.abs() * a,
    lambda a, b: a + b,
    lambda a, b: a * torch.sigmoid(b),
    lambda a, b: (a - b).abs(),
)


def programs(seed: int, outputs: int = 0) -> Iterator[Program]:
    """An endless sequence of distinct programs, the same for the same `seed`.

    With `outputs`, each has at least one more, and up to so many.
    """
    draw, draw_outputs = random.Random(seed), random.Random(seed)
    seen: set[Program] = set()
    while True:
        program = _draw(draw)
        if outputs:
            more = draw_outputs.randint(1, outputs)
            program = replace(program, copies=program.copies + more)
        if program not in seen:
            seen.add(program)
            yield program


def _draw(draw: random.Random) -> Program:
    dtype = draw.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    count = draw.choice(range(9))
    return Program(
        norm=draw.choice(("rms", "layer")),
        dtype=dtype,
        saved_dtype=draw.choice((dtype, dtype, "fp32")),
        output_dtype=draw.choice((dtype, dtype, "fp32")),
        rows=draw.choice(ROWS),
        columns=draw.choice(COLUMNS if draw.random() < 0.85 else UNALIGNED_COLUMNS),
        sums=tuple(draw.choice(("product", "scaled")) for _ in range(count)),
        residuals=draw.choice((0, 0, 1, 2, 3)),
        mixed=draw.random() < 0.4,
        dropout=draw.choices(("", "mask", "seed"), (6, 2, 1))[0],
        copies=draw.choice((0, 0, 0, 1, 2)),
        recomputed=draw.random() < 0.25,
        gelu=draw.choices(("", "none", "tanh"), (6, 1, 1))[0],
    )


def make(program: Program, mode: Any) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The program as Inductor receives it, on the described GPU, under the fake mode `mode`."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode:
        inputs = [torch.empty(shape, dtype=d, device="cuda") for shape, d in program.specs()]
    traced = make_fx(program.fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *inputs
    )
    return traced, inputs
