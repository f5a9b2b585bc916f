# mypy: allow-untyped-decorators
# mypy: allow-untyped-defs
"""
erf, tanh and the logistic function of float32, without branches.

libdevice's erf chooses between two sets of coefficients, an instruction or two for each,
and its tanh branches: an element takes 20 to 30 instructions, so that the kernels of a
GELU are bound by instructions, not by memory. Here both ranges are computed and one is
selected, 14 to 20 instructions. Errors are at most 2 units in the last place of erf and 3
of tanh; the logistic function's are Triton's own, without the selections of a division
that rounds at the ends of the exponent's range. NaN stays NaN.

Each is two functions: Triton compiles what follows a conditional return too, and some
instructions here are float32's alone.

Coefficients are of least maximal relative error on their range, by Lawson's iteration:
Lawson, "Contributions to the theory of linear least maximum approximation", 1961.
"""

from .triton_compat import libdevice, tl, triton


@triton.jit
def _erf_float32(x):
    # x + x * P(x^2), up to 0.8
    z = x * x
    p = tl.fma(z, -6.535228458e-4, 5.085129291e-3)
    p = tl.fma(p, z, -2.682080679e-2)
    p = tl.fma(p, z, 1.128311306e-1)
    p = tl.fma(p, z, -3.761260211e-1)
    p = tl.fma(p, z, 1.283791661e-1)
    near = tl.fma(p, x, x)
    # 1 - 2^(|x| * Q(|x|)), from 0.8 on; it is 1 in float32 from 3.92 on
    t = tl.minimum(tl.abs(x), 4.0, propagate_nan=tl.PropagateNan.ALL)
    q = tl.fma(t, 3.120024630e-4, -4.664984066e-3)
    q = tl.fma(q, t, 3.310801834e-2)
    q = tl.fma(q, t, -1.519911140e-1)
    q = tl.fma(q, t, -9.170502424e-1)
    q = tl.fma(q, t, -1.628130436)
    far = libdevice.copysign(1.0 - tl.exp2(q * t), x)
    return tl.where(tl.abs(x) < 0.8, near, far)


@triton.jit
def erf(x):
    """erf(x), of a block of any shape; other types than float32 are libdevice's."""
    if x.dtype == tl.float32:
        result = _erf_float32(x)
    else:
        result = libdevice.erf(x)
    return result


@triton.jit
def _tanh_float32(x):
    # x + x * x^2 * P(x^2), up to 0.6
    z = x * x
    p = tl.fma(z, -5.895146635e-3, 2.079596184e-2)
    p = tl.fma(p, z, -5.378382653e-2)
    p = tl.fma(p, z, 1.333192438e-1)
    p = tl.fma(p, z, -3.333329856e-1)
    near = tl.fma(p * z, x, x)
    # 1 - 2 / (1 + e^(2|x|)), from 0.6 on
    e = tl.exp2(tl.abs(x) * 2.8853900817779268)
    far = tl.fma(libdevice.fast_dividef(1.0, e + 1.0), -2.0, 1.0)
    # the sign last, for that of zero
    return libdevice.copysign(tl.where(tl.abs(x) < 0.6, near, far), x)


@triton.jit
def tanh(x):
    """tanh(x), of a block of any shape; other types than float32 are libdevice's."""
    if x.dtype == tl.float32:
        result = _tanh_float32(x)
    else:
        result = libdevice.tanh(x)
    return result


@triton.jit
def _sigmoid_float32(x):
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), of a block of any shape; other types than float32 are Triton's."""
    if x.dtype == tl.float32:
        result = _sigmoid_float32(x)
    else:
        result = tl.sigmoid(x)
    return result
