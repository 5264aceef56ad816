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

from afmoe.moe.compute.kernels.launch import BLOCK, padded, quantizer_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.scales import block_scale, e4m3_codes, magnitude_bits


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
        column_copy = (
            x_RK.new_empty(padded_k, layout.num_tiles * TILE_ROWS, dtype=torch.float8_e4m3fn),
            x_RK.new_empty(layout.num_tiles, padded_k, dtype=torch.float32),
        )
    if rows or columns:
        _quantize_activations_kernel[(layout.num_tiles, padded_k // BLOCK)](
            x_RK,
            *(row_copy or column_copy),
            *(column_copy or row_copy),
            layout.expert_of_tile,
            layout.first_row_of_tile,
            layout.end_row_of_tile,
            layout.num_experts,
            num_rows,
            size_k,
            padded_k,
            layout.num_tiles * TILE_ROWS,
            POWERS_OF_TWO=powers_of_two,
            WITH_ROWS=rows,
            WITH_COLUMNS=columns,
            BLOCK=BLOCK,
            **quantizer_options(),
        )
    return row_copy, column_copy


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
    _quantize_weights_kernel[(num_experts, padded_n // BLOCK, padded_k // BLOCK)](
        w_LNK,
        *forward,
        *(backward or forward),
        size_n,
        size_k,
        padded_n,
        padded_k,
        POWERS_OF_TWO=powers_of_two,
        WITH_TRANSPOSED=transposed,
        BLOCK=BLOCK,
        **quantizer_options(),
    )
    return Weight(forward, backward)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_activations_kernel(
    x,
    codes,
    scales,
    column_codes,
    column_scales,
    expert_of_tile,
    first_row_of_tile,
    end_row_of_tile,
    num_experts,
    num_rows,
    size_k,
    padded_k,
    padded_rows,
    POWERS_OF_TWO: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(expert_of_tile + tile)
    if (expert < 0) | (expert == num_experts):
        return
    m = tl.load(first_row_of_tile + tile) + tl.arange(0, BLOCK)
    is_row = m < tl.load(end_row_of_tile + tile)
    k = block * BLOCK + tl.arange(0, BLOCK)
    rows = m.to(tl.int64)[:, None]
    values = tl.load(x + rows * size_k + k[None, :], mask=is_row[:, None] & (k < size_k)[None, :], other=0.0)
    values = values.to(tl.float32)
    magnitudes = magnitude_bits(values)
    if WITH_ROWS:
        scale = block_scale(tl.max(magnitudes, 1), POWERS_OF_TWO)
        tl.store(
            codes + rows * padded_k + k[None, :],
            e4m3_codes(values, scale[:, None], POWERS_OF_TWO),
            mask=is_row[:, None],
        )
        tl.store(scales + block.to(tl.int64) * num_rows + m, scale, mask=is_row)
    if WITH_COLUMNS:
        scale = block_scale(tl.max(magnitudes, 0), POWERS_OF_TWO)
        slot = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(
            column_codes + k.to(tl.int64)[:, None] * padded_rows + slot[None, :],
            tl.trans(e4m3_codes(values, scale[None, :], POWERS_OF_TWO)),
        )
        tl.store(column_scales + tile.to(tl.int64) * padded_k + k, scale)


@triton.jit
def _quantize_weights_kernel(
    w,
    codes,
    scales,
    transposed_codes,
    transposed_scales,
    size_n,
    size_k,
    padded_n,
    padded_k,
    POWERS_OF_TWO: tl.constexpr,
    WITH_TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    block_n, block_k = tl.program_id(1), tl.program_id(2)
    n = (block_n * BLOCK + tl.arange(0, BLOCK))[:, None]
    k = (block_k * BLOCK + tl.arange(0, BLOCK))[None, :]
    values = tl.load(
        w + expert * size_n * size_k + n * size_k + k, mask=(n < size_n) & (k < size_k), other=0.0
    ).to(tl.float32)
    amax_bits = tl.max(tl.max(magnitude_bits(values), 1, keep_dims=True), 0, keep_dims=True)
    scale = block_scale(amax_bits, POWERS_OF_TWO)
    quantized = e4m3_codes(values, scale, POWERS_OF_TWO)
    num_blocks_n, num_blocks_k = padded_n // BLOCK, padded_k // BLOCK
    one = tl.arange(0, 1)
    first_scale = expert * num_blocks_n * num_blocks_k + one[:, None] + one[None, :]
    tl.store(codes + expert * padded_n * padded_k + n * padded_k + k, quantized)
    tl.store(scales + first_scale + block_n * num_blocks_k + block_k, scale)
    if WITH_TRANSPOSED:
        n_inner = (block_n * BLOCK + tl.arange(0, BLOCK))[None, :]
        k_outer = (block_k * BLOCK + tl.arange(0, BLOCK))[:, None]
        tl.store(
            transposed_codes + expert * padded_n * padded_k + k_outer * padded_n + n_inner,
            tl.trans(quantized),
        )
        tl.store(transposed_scales + first_scale + block_k * num_blocks_n + block_n, scale)
