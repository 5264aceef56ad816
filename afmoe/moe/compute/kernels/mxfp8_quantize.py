# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""mxfp8 operands: e4m3 codes in blocks of 32 with e8m0 scales; one read of the values writes every copy.

Padded as fp8's copies are (`fp8_quantize`). Scales lie beside their codes, 4 bytes for 128 codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afmoe.moe.compute.kernels.launch import launch_row_quantizer, launch_weight_quantizer, padded
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.scales import block_scale, e4m3_codes, exponent_byte, magnitude_bits
from afmoe.moe.compute.kernels.tiles import TILE, gradient_tile, load_tile, row_tile
from afmoe.moe.quantization import MX_BLOCK_SIZE

MX_BLOCK = tl.constexpr(MX_BLOCK_SIZE)


def quantize_mx_activations(
    x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool
) -> tuple[Stored, Stored]:
    """The copy for sums over K and the one for sums over an expert's rows; empty where not asked for.

    Rows: codes [R, K'] and exponents [R, K' / 32] (uint8). Columns, transposed: codes [K', 128 num_tiles] and
    exponents [K', 4 num_tiles]. K' is K up to whole blocks of 128. Padding rows, and columns of tiles that
    belong to no expert, stay unwritten: no product reads them.
    """
    x_RK = x_RK.contiguous()
    num_rows, size_k = x_RK.shape
    padded_k = padded(size_k)
    row_copy = _new_copy(x_RK, num_rows, padded_k) if rows else ()
    column_copy = mx_columns_like(x_RK, layout.num_tiles) if columns else ()
    launch_row_quantizer(_quantize_activations_kernel, x_RK, layout, row_copy, column_copy)
    return row_copy, column_copy


def mx_columns_like(x_RK: Tensor, num_tiles: int) -> Stored:
    return _new_copy(x_RK, padded(x_RK.shape[1]), num_tiles * TILE_ROWS)


def quantize_mx_weights(w_LNK: Tensor, *, transposed: bool) -> Weight:
    """Codes [L, N', K'] with exponents along K, and codes [L, K', N'] with exponents along N."""
    w_LNK = w_LNK.contiguous()
    num_experts, size_n, size_k = w_LNK.shape
    padded_n, padded_k = padded(size_n), padded(size_k)
    forward = _new_copy(w_LNK, num_experts, padded_n, padded_k)
    backward = _new_copy(w_LNK, num_experts, padded_k, padded_n) if transposed else ()
    launch_weight_quantizer(_quantize_weights_kernel, w_LNK, forward, backward)
    return Weight(forward, backward)


def _new_copy(like: Tensor, *shape: int) -> Stored:
    return (
        like.new_empty(shape, dtype=torch.float8_e4m3fn),
        like.new_empty(*shape[:-1], shape[-1] // MX_BLOCK_SIZE, dtype=torch.uint8),
    )


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def _quantize_activations_kernel(
    x,
    codes,
    exponents,
    column_codes,
    column_exponents,
    tiles,
    num_tiles,
    num_experts,
    num_rows,
    size_k,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
):
    num_blocks = tl.cdiv(size_k, TILE)
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    expert, first_row, end_row = row_tile(tiles, num_tiles, tile)
    if (expert < 0) | (expert == num_experts):
        return
    values = load_tile(x, first_row, end_row, block, size_k)
    if WITH_ROWS:
        _store_blocks(values, codes, exponents, first_row.to(tl.int64), end_row, block, num_blocks)
    if WITH_COLUMNS:
        first_k = block.to(tl.int64) * TILE
        _store_blocks(
            tl.trans(values), column_codes, column_exponents, first_k, num_blocks * TILE, tile, num_tiles
        )


@triton.jit
def _quantize_weights_kernel(
    w,
    codes,
    exponents,
    transposed_codes,
    transposed_exponents,
    size_n,
    size_k,
    WITH_TRANSPOSED: tl.constexpr,
):
    expert, block_n, block_k = gradient_tile(size_n, size_k)
    expert = expert.to(tl.int64)
    values = load_tile(w + expert * size_n * size_k, block_n * TILE, size_n, block_k, size_k)
    num_n, num_k = tl.cdiv(size_n, TILE), tl.cdiv(size_k, TILE)
    # rows of all experts one after the other, whole tiles each
    first_n, first_k = (expert * num_n + block_n) * TILE, (expert * num_k + block_k) * TILE
    _store_blocks(values, codes, exponents, first_n, first_n + TILE, block_k, num_k)
    if WITH_TRANSPOSED:
        _store_blocks(
            tl.trans(values),
            transposed_codes,
            transposed_exponents,
            first_k,
            first_k + TILE,
            block_n,
            num_n,
        )


@triton.jit
def _store_blocks(values, codes, exponents, first_row, end_row, block, num_blocks):
    """Store a tile, quantized along its second dimension, as column block `block` of the rows from
    `first_row` (int64) on."""
    NUM: tl.constexpr = TILE // MX_BLOCK
    blocks = tl.reshape(values, (TILE, NUM, MX_BLOCK))
    scale = block_scale(tl.max(magnitude_bits(blocks), 2), True)
    quantized = tl.reshape(e4m3_codes(blocks, scale[:, :, None], True), (TILE, TILE))
    rows = first_row + tl.arange(0, TILE)[:, None]
    is_row = rows < end_row
    column = block * TILE + tl.arange(0, TILE)
    tl.store(codes + rows * (num_blocks * TILE) + column[None, :], quantized, mask=is_row)
    column = block * NUM + tl.arange(0, NUM)
    tl.store(exponents + rows * (num_blocks * NUM) + column[None, :], exponent_byte(scale), mask=is_row)
