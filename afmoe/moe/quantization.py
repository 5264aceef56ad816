"""Number formats of the quantized plugins: the written contract, and a plain torch reference of it.

fp8 is e4m3 (4 exponent and 3 mantissa bits, largest value 448) with one scale a block (DeepSeek-V3, arXiv
2412.19437, section 3.3):

    scale = max(|block|, 1e-12) / 448         code = e4m3(value / scale)         value again = code * scale

in fp32, rounded to the nearest e4m3 value, ties to the even one. With `scales=ue8m0` the scale is the
smallest power of two that is not below that quotient. Blocks are of 128, the last one of a row or column
smaller where 128 does not divide the size:

    rows     1 x 128 along the contracted dimension: the activations of y = x w.T, the gradients of dx = dy w
    weights  128 x 128: one copy serves y = x w.T and dx = dy w
    columns  128 x 1 down the rows of one expert, starting again at each: both operands of dw = dy.T x

mxfp8 is the same code with the block format of the OCP Microscaling Formats specification (MX) v1.0: blocks
of 32, scales always powers of two, rounded up as with `ue8m0` (arXiv 2506.08027 on why up), and two copies of
a weight:

    rows     1 x 32 along the contracted dimension, activations and gradients
    weights  1 x 32 along K for y = x w.T; 32 x 1 along N for dx = dy w
    columns  32 x 1 down the rows of one expert, starting again at each

Products are summed in fp32. Kernels and emulations give the codes and scales of the functions below bit for
bit; a power of two may be stored as its exponent's byte (e8m0).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 128
MX_BLOCK_SIZE = 32
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-12
"""Floor for a block's largest magnitude, so that a block of zeros has a scale."""
SCALE_FORMATS = ("fp32", "ue8m0")


def quantize_rows(x_RK: Tensor, scales: str, block_size: int = BLOCK_SIZE) -> tuple[Tensor, Tensor]:
    """Codes [R, K] (e4m3) and scales [R, ceil(K / block_size)] (fp32) of 1 x block_size blocks."""
    blocks = _pad_to_blocks(x_RK, 1, block_size).unflatten(1, (-1, block_size))
    codes, scale = _quantize(blocks, (2,), scales)
    return codes.flatten(1)[:, : x_RK.shape[1]], scale.squeeze(2)


def dequantize_rows(codes_RK: Tensor, scale_RB: Tensor, block_size: int = BLOCK_SIZE) -> Tensor:
    """The fp32 values that the codes stand for."""
    return codes_RK.float() * _expand(scale_RB, 1, codes_RK.shape[1], block_size)


def quantize_weights(w_LNK: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """Codes [L, N, K] (e4m3) and scales [L, ceil(N / 128), ceil(K / 128)] (fp32) of 128 x 128 blocks."""
    _, num_rows, num_columns = w_LNK.shape
    padded = _pad_to_blocks(_pad_to_blocks(w_LNK, 1), 2)
    blocks = padded.unflatten(2, (-1, BLOCK_SIZE)).unflatten(1, (-1, BLOCK_SIZE))
    codes, scale = _quantize(blocks, (2, 4), scales)
    return codes.flatten(3).flatten(1, 2)[:, :num_rows, :num_columns], scale.squeeze(4).squeeze(2)


def dequantize_weights(codes_LNK: Tensor, scale_LBB: Tensor) -> Tensor:
    """The fp32 values that the codes stand for."""
    _, num_rows, num_columns = codes_LNK.shape
    return codes_LNK.float() * _expand(_expand(scale_LBB, 1, num_rows), 2, num_columns)


def quantize_mx_weights(w_LNK: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """One of the two mxfp8 copies: codes [L, N, K] (e4m3) and power-of-two scales (fp32).

    `dim` 2: 1 x 32 blocks along K, scales [L, N, ceil(K / 32)]. `dim` 1: 32 x 1 blocks along N, scales
    [L, ceil(N / 32), K].
    """
    if dim == 1:
        codes_LKN, scale_LKB = quantize_mx_weights(w_LNK.transpose(1, 2), 2)
        return codes_LKN.transpose(1, 2), scale_LKB.transpose(1, 2)
    codes, scale = quantize_rows(w_LNK.flatten(0, 1), "ue8m0", MX_BLOCK_SIZE)
    return codes.view(w_LNK.shape), scale.unflatten(0, w_LNK.shape[:2])


def dequantize_mx_weights(codes_LNK: Tensor, scale: Tensor, dim: int) -> Tensor:
    """The fp32 values that the codes stand for."""
    return codes_LNK.float() * _expand(scale, dim, codes_LNK.shape[dim], MX_BLOCK_SIZE)


def quantize_columns(
    x_RK: Tensor, offsets_L: Tensor, scales: str, block_size: int = BLOCK_SIZE
) -> tuple[Tensor, Tensor]:
    """Codes [R, K] (e4m3) and scales [B, K] (fp32) of block_size x 1 blocks that start again at each expert.

    R is the row at which the last expert ends: padding rows have no code. Blocks are in the order of the
    rows.
    """
    borders = [0, *offsets_L.tolist()]
    quantized = [
        quantize_rows(x_RK[start:end].t(), scales, block_size) for start, end in itertools.pairwise(borders)
    ]
    codes, scale = zip(*quantized, strict=True)
    return torch.cat([c.t() for c in codes]), torch.cat([s.t() for s in scale])


def dequantize_columns(
    codes_RK: Tensor, scale_BK: Tensor, offsets_L: Tensor, block_size: int = BLOCK_SIZE
) -> Tensor:
    """The fp32 values that the codes stand for."""
    counts = [end - start for start, end in itertools.pairwise([0, *offsets_L.tolist()])]
    scales = scale_BK.split([-(-count // block_size) for count in counts])
    expanded = [_expand(scale, 0, count, block_size) for scale, count in zip(scales, counts, strict=True)]
    return codes_RK.float() * torch.cat(expanded)


def block_scale(amax: Tensor, scales: str) -> Tensor:
    """The scale of blocks whose largest magnitudes are `amax` (fp32)."""
    # by a tensor: torch divides by a number on a GPU by multiplying with its reciprocal
    # (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which rounds 53 % of scales otherwise
    scale = amax.clamp_min(SMALLEST_AMAX) / amax.new_full((), E4M3_MAX)
    return scale if scales == "fp32" else round_up_to_power_of_two(scale)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each (fp32, positive, normal), by bit arithmetic."""
    bits = scale.view(torch.int32)
    has_fraction = (bits & 0x7FFFFF) != 0
    # infinity and NaN keep their bits: a broken block stays visible
    rounded = torch.where(has_fraction, (bits & ~0x7FFFFF) + 0x800000, bits)
    return torch.where(scale.isfinite(), rounded.view(torch.float32), scale)


def _quantize(blocks: Tensor, block_dims: tuple[int, ...], scales: str) -> tuple[Tensor, Tensor]:
    scale = block_scale(blocks.abs().amax(block_dims, keepdim=True), scales)
    # clamped: whether the cast saturates or overflows is up to the torch version
    return (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _pad_to_blocks(x: Tensor, dim: int, block_size: int = BLOCK_SIZE) -> Tensor:
    """fp32, with zeros behind `dim` up to whole blocks; zeros change no maximum and no code."""
    padding = [0, 0] * (x.ndim - 1 - dim) + [0, -x.shape[dim] % block_size]
    return F.pad(x.float(), padding)


def _expand(scale: Tensor, dim: int, size: int, block_size: int = BLOCK_SIZE) -> Tensor:
    """One scale an element instead of one a block along `dim`, cut to `size`."""
    return scale.repeat_interleave(block_size, dim).narrow(dim, 0, size)
