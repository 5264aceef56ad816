# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Scales and codes inside kernels: bit for bit those of `afmoe.moe.quantization`."""

from __future__ import annotations

import triton
import triton.language as tl

from afmoe.moe.quantization import E4M3_MAX

# fp32 bits of `SMALLEST_AMAX`, 1e-12
_SMALLEST_AMAX_BITS = tl.constexpr(0x2B8CBCCC)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_EXPONENT_ONE = tl.constexpr(0x800000)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(values):
    """fp32 bits without the sign, as int32: ordered as the magnitudes are, with NaN above infinity.

    A maximum over floats would drop NaN; over these it keeps it, and a broken block stays visible.
    """
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(amax_bits, POWERS_OF_TWO: tl.constexpr):
    """The scale of blocks whose largest magnitudes have these bits."""
    amax = tl.maximum(amax_bits, _SMALLEST_AMAX_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, _E4M3_MAX)
    if POWERS_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        has_fraction = ((bits & 0x7FFFFF) != 0) & (bits < _INFINITY_BITS)
        bits = tl.where(has_fraction, (bits & 0x7F800000) + _EXPONENT_ONE, bits)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def e4m3_codes(values, scale, POWERS_OF_TWO: tl.constexpr):
    """values / scale, rounded to e4m3; `scale` broadcasts against `values`.

    No clamp: at most 448 (1 + 2^-23) arises, which rounds to 448, and the cast saturates on a GPU.
    """
    if POWERS_OF_TWO:
        # exact, and one division a block instead of one a value
        scaled = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        scaled = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    return scaled.to(tl.float8e4nv)


@triton.jit
def exponent_byte(scale):
    """A power of two as e8m0: its biased exponent. Infinity and NaN become 255, e8m0's NaN."""
    return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
