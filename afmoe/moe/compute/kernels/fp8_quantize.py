# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""fp8 operands: one read of the values writes every copy that the products need.

Copies are padded with codes of zero: up to whole blocks of 128 along N and K, and to whole tiles of 128 rows
per expert in the copies for weight gradients. So the products need no masks where they read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afmoe.moe.compute.kernels.launch import BLOCK, launch_row_quantizer, launch_weight_quantizer, padded
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.scales import block_scale, e4m3_codes, magnitude_bits
from afmoe.moe.compute.kernels.tiles import TILE, gradient_tile, load_tile, row_tile


def quantize_activations(
    x_RK: Tensor, layout: TileLayout, *, powers_of_two: bool, rows: bool, columns: bool
) -> tuple[Stored, Stored]:
    """The copy for sums over K and the one for sums over an expert's rows; empty where not asked for.

    Rows: codes [R, K'] and scales [K' / 128, R] of 1 x 128 blocks. Columns: codes [K', 128 num_tiles],
    transposed, and scales [num_tiles, K'] of 128 x 1 blocks. K' is K up to whole blocks. Padding rows, and
    columns of tiles that belong to no expert, stay unwritten: no product reads them.
    """
    x_RK = x_RK.contiguous()
    num_rows, size_k = x_RK.shape
    padded_k = padded(size_k)
    row_copy = column_copy = ()
    if rows:
        row_copy = (
            x_RK.new_empty(num_rows, padded_k, dtype=torch.float8_e4m3fn),
            x_RK.new_empty(padded_k // BLOCK, num_rows, dtype=torch.float32),
        )
    if columns:
        column_copy = columns_like(x_RK, layout.num_tiles)
    launch_row_quantizer(
        _quantize_activations_kernel, x_RK, layout, row_copy, column_copy, POWERS_OF_TWO=powers_of_two
    )
    return row_copy, column_copy


def columns_like(x_RK: Tensor, num_tiles: int) -> Stored:
    padded_k = padded(x_RK.shape[1])
    return (
        x_RK.new_empty(padded_k, num_tiles * TILE_ROWS, dtype=torch.float8_e4m3fn),
        x_RK.new_empty(num_tiles, padded_k, dtype=torch.float32),
    )


def quantize_weights(w_LNK: Tensor, *, powers_of_two: bool, transposed: bool) -> Weight:
    """Codes [L, N', K'] and scales [L, N' / 128, K' / 128] of 128 x 128 blocks; transposed both N' <-> K'."""
    w_LNK = w_LNK.contiguous()
    num_experts, size_n, size_k = w_LNK.shape
    padded_n, padded_k = padded(size_n), padded(size_k)

    def new_copy(outer: int, inner: int) -> Stored:
        return (
            w_LNK.new_empty(num_experts, outer, inner, dtype=torch.float8_e4m3fn),
            w_LNK.new_empty(num_experts, outer // BLOCK, inner // BLOCK, dtype=torch.float32),
        )

    forward = new_copy(padded_n, padded_k)
    backward = new_copy(padded_k, padded_n) if transposed else ()
    launch_weight_quantizer(_quantize_weights_kernel, w_LNK, forward, backward, POWERS_OF_TWO=powers_of_two)
    return Weight(forward, backward)


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def _quantize_activations_kernel(
    x,
    codes,
    scales,
    column_codes,
    column_scales,
    tiles,
    num_tiles,
    num_experts,
    num_rows,
    size_k,
    POWERS_OF_TWO: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
):
    num_blocks = tl.cdiv(size_k, TILE)
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    expert, first_row, end_row = row_tile(tiles, num_tiles, tile)
    if (expert < 0) | (expert == num_experts):
        return
    values = load_tile(x, first_row, end_row, block, size_k)
    magnitudes = magnitude_bits(values)
    within = tl.arange(0, TILE)
    m, k = first_row + within, block * TILE + within
    if WITH_ROWS:
        scale = block_scale(tl.max(magnitudes, 1), POWERS_OF_TWO)
        tl.store(
            codes + m.to(tl.int64)[:, None] * (num_blocks * TILE) + k[None, :],
            e4m3_codes(values, scale[:, None], POWERS_OF_TWO),
            mask=(m < end_row)[:, None],
        )
        tl.store(scales + block.to(tl.int64) * num_rows + m, scale, mask=m < end_row)
    if WITH_COLUMNS:
        scale = block_scale(tl.max(magnitudes, 0), POWERS_OF_TWO)
        slot = tile * TILE + within
        tl.store(
            column_codes + k.to(tl.int64)[:, None] * (num_tiles * TILE) + slot[None, :],
            tl.trans(e4m3_codes(values, scale[None, :], POWERS_OF_TWO)),
        )
        tl.store(column_scales + tile.to(tl.int64) * (num_blocks * TILE) + k, scale)


@triton.jit
def _quantize_weights_kernel(
    w,
    codes,
    scales,
    transposed_codes,
    transposed_scales,
    size_n,
    size_k,
    POWERS_OF_TWO: tl.constexpr,
    WITH_TRANSPOSED: tl.constexpr,
):
    expert, block_n, block_k = gradient_tile(size_n, size_k)
    expert = expert.to(tl.int64)
    values = load_tile(w + expert * size_n * size_k, block_n * TILE, size_n, block_k, size_k)
    amax_bits = tl.max(tl.max(magnitude_bits(values), 1, keep_dims=True), 0, keep_dims=True)
    scale = block_scale(amax_bits, POWERS_OF_TWO)
    quantized = e4m3_codes(values, scale, POWERS_OF_TWO)
    num_n, num_k = tl.cdiv(size_n, TILE), tl.cdiv(size_k, TILE)
    padded_n, padded_k = num_n * TILE, num_k * TILE
    first_code, first_scale = expert * padded_n * padded_k, expert * num_n * num_k
    within, one = tl.arange(0, TILE), tl.arange(0, 1)
    n, k = block_n * TILE + within, block_k * TILE + within
    one = one[:, None] + one[None, :]
    tl.store(codes + first_code + n[:, None] * padded_k + k[None, :], quantized)
    tl.store(scales + first_scale + block_n * num_k + block_k + one, scale)
    if WITH_TRANSPOSED:
        tl.store(transposed_codes + first_code + k[:, None] * padded_n + n[None, :], tl.trans(quantized))
        tl.store(transposed_scales + first_scale + block_k * num_n + block_n + one, scale)
