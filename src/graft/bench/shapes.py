"""Groups of [M, N] shapes that every two-dimensional case can be measured over."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

from graft.errors import UsageError

Shape = tuple[int, ...]

# Row counts and widths of public models' norms: 4096 to 16384 rows of 2048 to 16384 (language
# models), 32768 rows of 768 to 2048 (encoders), and long thin ones (vision, recommenders).
NORMS14: tuple[Shape, ...] = (
    (4096, 8192),
    (8192, 8192),
    (2048, 8192),
    (4096, 4096),
    (8192, 4096),
    (16384, 4096),
    (16384, 8192),
    (32768, 768),
    (32768, 1024),
    (32768, 2048),
    (8192, 2048),
    (131072, 512),
    (4096, 16384),
    (1152000, 128),
)

# 2^28 elements are 512 MB of bf16 and 2 GB of the float64 reference.
_LARGEST_NUMEL = 2**28


def _halves(low: int, high: int) -> list[int]:
    """2^low to 2^high with 3 * 2^k between, which is how widths of models are chosen."""
    out = []
    for k in range(low, high):
        out += [2**k, 3 * 2 ** (k - 1)]
    return [*out, 2**high]


def _grid() -> tuple[Shape, ...]:
    """Log-spaced M in [256, 2^20] by N in [64, 16384], two points an octave, and odd ones.

    Every other M is odd, so that no block size divides it. The odd N are one below or above a
    power of two, or far from one: rows that are not aligned to 16 bytes.

    They come in the order of a checksum of their names: any part of it, such as what a run had
    measured when it was cut, has shapes from everywhere.
    """
    rows = [m if i % 2 == 0 else m + 1 - m % 2 for i, m in enumerate(_halves(8, 20))]
    shapes = [(m, n) for m in rows for n in _halves(6, 14)]
    shapes += [
        (m, n)
        for m in (1000, 4097, 16383, 65537, 262143)
        for n in (65, 127, 513, 1000, 2049, 5003, 12289)
    ]
    kept = [(m, n) for m, n in shapes if m * n <= _LARGEST_NUMEL]
    return tuple(sorted(kept, key=lambda shape: zlib.crc32(text(shape).encode())))


def text(shape: Shape) -> str:
    """`(4096, 8192)` as `4096x8192`, the form that the command line and the tables use."""
    return "x".join(map(str, shape)) or "scalar"


GRID = _grid()
# What a model's constants may be fitted to, and what it is judged by: every third shape.
GRID_FITTED = tuple(shape for i, shape in enumerate(GRID) if i % 3)
GRID_HELD_OUT = GRID[::3]

GROUPS: Mapping[str, tuple[Shape, ...]] = {
    "norms14": NORMS14,
    "grid": GRID,
    "grid_fitted": GRID_FITTED,
    "grid_held_out": GRID_HELD_OUT,
}

_LITERAL = re.compile(r"\d+(x\d+)*")


def groups(own: Mapping[str, Sequence[Shape]]) -> dict[str, Sequence[Shape]]:
    """A case's own groups; where its shapes are of two dimensions, norms14 and the grids too."""
    two = {len(shape) for shapes in own.values() for shape in shapes} == {2}
    return {**own, **{name: GROUPS[name] for name in GROUPS if two and name not in own}}


def resolve(wanted: str, own: Mapping[str, Sequence[Shape]], case: str) -> list[tuple[str, Shape]]:
    """The (group, shape) pairs that `wanted` names for a case.

    `wanted` is a list by commas of names of `groups(own)` and literal shapes (`4096x8192`).
    Raises UsageError for a name that is neither.
    """
    ranks = {len(shape) for shapes in own.values() for shape in shapes}
    known = groups(own)
    out: list[tuple[str, Shape]] = []
    for word in filter(None, wanted.split(",")):
        if word in known:
            out += [(word, tuple(shape)) for shape in known[word]]
        elif _LITERAL.fullmatch(word):
            shape = tuple(map(int, word.split("x")))
            if len(shape) not in ranks:
                form = "x".join("MNKLJ"[: max(ranks)])
                raise UsageError(
                    f"case {case} takes shapes of the form {form}, not {word}",
                    next=f"graft bench {case} --shapes default",
                )
            out.append(("given", shape))
        else:
            raise UsageError(
                f"case {case} has no shape group {word!r}; it has {', '.join(known)},"
                " and shapes can be given as 4096x8192",
                next=f"graft bench {case} --shapes {next(iter(known))}",
            )
    return out
