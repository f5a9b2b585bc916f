# mypy: allow-untyped-decorators
# mypy: allow-incomplete-defs
# mypy: allow-untyped-defs
"""Uniform numbers of Philox, four of each call."""

from .triton_compat import tl, triton


@triton.jit
def rand(seed, offset):
    """Float32 in [0, 1), of any shape: for each offset one of the four of its group."""
    a, b, c, d = tl.randint4x(seed, offset >> 2)
    place = offset & 3
    number = tl.where(
        place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d)
    )
    return tl.random.uint_to_uniform_float(number)


@triton.jit
def rand_groups(seed, offset, group, SHAPE: tl.constexpr):
    """
    The same, of offsets [..., n] of which each four along the last dimension are one of
    ``group``, [..., n / 4].
    """
    LENGTH: tl.constexpr = SHAPE[len(SHAPE) - 1]
    if LENGTH < 4:
        return rand(seed, offset)
    a, b, c, d = tl.randint4x(seed, group.to(tl.uint32))
    numbers = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), SHAPE)
    return tl.random.uint_to_uniform_float(numbers)
