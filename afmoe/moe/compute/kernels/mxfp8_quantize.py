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

from afmoe.moe.compute.kernels.launch import BLOCK, padded, quantizer_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.scales import block_scale, e4m3_codes, exponent_byte, magnitude_bits
from afmoe.moe.quantization import MX_BLOCK_SIZE


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
    column_copy = _new_copy(x_RK, padded_k, layout.num_tiles * TILE_ROWS) if columns else ()
    if rows or columns:
        _quantize_activations_kernel[(layout.num_tiles, padded_k // BLOCK)](
            x_RK,
            *(row_copy or column_copy),
            *(column_copy or row_copy),
            layout.expert_of_tile,
            layout.first_row_of_tile,
            layout.end_row_of_tile,
            layout.num_experts,
            size_k,
            padded_k,
            layout.num_tiles * TILE_ROWS,
            WITH_ROWS=rows,
            WITH_COLUMNS=columns,
            BLOCK=BLOCK,
            MX_BLOCK=MX_BLOCK_SIZE,
            **quantizer_options(),
        )
    return row_copy, column_copy


def quantize_mx_weights(w_LNK: Tensor, *, transposed: bool) -> Weight:
    """Codes [L, N', K'] with exponents along K, and codes [L, K', N'] with exponents along N."""
    w_LNK = w_LNK.contiguous()
    num_experts, size_n, size_k = w_LNK.shape
    padded_n, padded_k = padded(size_n), padded(size_k)
    forward = _new_copy(w_LNK, num_experts, padded_n, padded_k)
    backward = _new_copy(w_LNK, num_experts, padded_k, padded_n) if transposed else ()
    _quantize_weights_kernel[(num_experts, padded_n // BLOCK, padded_k // BLOCK)](
        w_LNK,
        *forward,
        *(backward or forward),
        size_n,
        size_k,
        padded_n,
        padded_k,
        WITH_TRANSPOSED=transposed,
        BLOCK=BLOCK,
        MX_BLOCK=MX_BLOCK_SIZE,
        **quantizer_options(),
    )
    return Weight(forward, backward)


def _new_copy(like: Tensor, *shape: int) -> Stored:
    return (
        like.new_empty(shape, dtype=torch.float8_e4m3fn),
        like.new_empty(*shape[:-1], shape[-1] // MX_BLOCK_SIZE, dtype=torch.uint8),
    )


@triton.jit
def _quantize_activations_kernel(
    x,
    codes,
    exponents,
    column_codes,
    column_exponents,
    expert_of_tile,
    first_row_of_tile,
    end_row_of_tile,
    num_experts,
    size_k,
    padded_k,
    padded_rows,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    MX_BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(expert_of_tile + tile)
    if (expert < 0) | (expert == num_experts):
        return
    m = tl.load(first_row_of_tile + tile) + tl.arange(0, BLOCK)
    is_row = (m < tl.load(end_row_of_tile + tile))[:, None]
    k = block * BLOCK + tl.arange(0, BLOCK)
    rows = m.to(tl.int64)[:, None]
    values = tl.load(x + rows * size_k + k[None, :], mask=is_row & (k < size_k)[None, :], other=0.0)
    values = values.to(tl.float32)
    if WITH_ROWS:
        _store_blocks(values, codes, exponents, rows, block, padded_k, is_row, BLOCK, MX_BLOCK)
    if WITH_COLUMNS:
        _store_blocks(
            tl.trans(values),
            column_codes,
            column_exponents,
            k.to(tl.int64)[:, None],
            tile,
            padded_rows,
            (k < padded_k)[:, None],
            BLOCK,
            MX_BLOCK,
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
    padded_n,
    padded_k,
    WITH_TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    MX_BLOCK: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    block_n, block_k = tl.program_id(1), tl.program_id(2)
    n = block_n * BLOCK + tl.arange(0, BLOCK)
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        w + expert * size_n * size_k + n[:, None] * size_k + k[None, :],
        mask=(n < size_n)[:, None] & (k < size_k)[None, :],
        other=0.0,
    ).to(tl.float32)
    rows = (expert * padded_n + n)[:, None]
    _store_blocks(values, codes, exponents, rows, block_k, padded_k, (n < padded_n)[:, None], BLOCK, MX_BLOCK)
    if WITH_TRANSPOSED:
        rows = (expert * padded_k + k)[:, None]
        is_row = (k < padded_k)[:, None]
        _store_blocks(
            tl.trans(values),
            transposed_codes,
            transposed_exponents,
            rows,
            block_n,
            padded_n,
            is_row,
            BLOCK,
            MX_BLOCK,
        )


@triton.jit
def _store_blocks(
    values,
    codes,
    exponents,
    rows,
    block,
    row_size,
    is_row,
    BLOCK: tl.constexpr,
    MX_BLOCK: tl.constexpr,
):
    """Store a 128 x 128 tile, quantized along its second dimension, as column block `block` of the rows."""
    NUM: tl.constexpr = BLOCK // MX_BLOCK
    blocks = tl.reshape(values, (BLOCK, NUM, MX_BLOCK))
    scale = block_scale(tl.max(magnitude_bits(blocks), 2), True)
    quantized = tl.reshape(e4m3_codes(blocks, scale[:, :, None], True), (BLOCK, BLOCK))
    column = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + rows * row_size + column[None, :], quantized, mask=is_row)
    column = block * NUM + tl.arange(0, NUM)
    tl.store(exponents + rows * (row_size // MX_BLOCK) + column[None, :], exponent_byte(scale), mask=is_row)
