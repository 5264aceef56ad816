# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Grouped products of bf16 operands, summed in fp32.

Operands are stored with zeros up to multiples of 128 along N and K, so that every load is whole and aligned;
where the sizes are such multiples, as in all published models, nothing is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from afmoe.moe.compute.kernels.launch import BLOCK, GROUP, padded, product_grid, product_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout, tile_and_column
from afmoe.moe.compute.kernels.products import Stored, Weight

_STEP = 64
_BYTES_PER_STAGE = 2 * _STEP * (TILE_ROWS + BLOCK)


class Bf16Products:
    """Operands are rounded to bf16, where they are not bf16 already."""

    columns_are_rows = True

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight:
        w_LNK = _stored(w_LNK, num_dims=2)
        return Weight(forward=(w_LNK,), transposed=(w_LNK.transpose(1, 2),) if transposed else ())

    def store(self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool) -> tuple[Stored, Stored]:
        x_RK = _stored(x_RK, num_dims=1)
        return ((x_RK,) if rows else ()), ((x_RK,) if columns else ())

    def multiply(self, pairs: Sequence[tuple[Stored, Stored]], layout: TileLayout, out_RN: Tensor) -> Tensor:
        ((x_RK,), (w_LNK,)), ((second_x_RK,), (second_w_LNK,)) = pairs[0], pairs[-1]
        _multiply_kernel[product_grid(layout.num_tiles, out_RN.shape[1])](
            x_RK,
            w_LNK,
            second_x_RK,
            second_w_LNK,
            out_RN,
            layout.expert_of_tile,
            layout.first_row_of_tile,
            layout.end_row_of_tile,
            layout.num_tiles,
            layout.num_experts,
            out_RN.shape[1],
            x_RK.shape[1],
            *w_LNK.stride(),
            NUM_PAIRS=len(pairs),
            BLOCK_M=TILE_ROWS,
            BLOCK_N=BLOCK,
            BLOCK_K=_STEP,
            GROUP=GROUP,
            **product_options(_BYTES_PER_STAGE),
        )
        return out_RN

    def weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        (grad_RN,), (x_RK,) = grad_columns, x_columns
        num_experts, size_n, size_k = out_LNK.shape
        grid = (num_experts * triton.cdiv(size_n, BLOCK) * triton.cdiv(size_k, BLOCK),)
        _weight_gradient_kernel[grid](
            grad_RN,
            x_RK,
            out_LNK,
            layout.offsets_L,
            size_n,
            size_k,
            grad_RN.shape[1],
            x_RK.shape[1],
            BLOCK_M=_STEP,
            BLOCK_N=BLOCK,
            BLOCK_K=BLOCK,
            **product_options(_BYTES_PER_STAGE),
        )
        return out_LNK


def _stored(x: Tensor, num_dims: int) -> Tensor:
    """bf16, the last dims padded with zeros to whole blocks."""
    x = x.bfloat16()
    padding = [(0, padded(size) - size) for size in reversed(x.shape[-num_dims:])]
    # padding by nothing would copy
    is_whole = all(behind == 0 for _, behind in padding)
    return x.contiguous() if is_whole else F.pad(x, list(itertools.chain.from_iterable(padding)))


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_kernel(
    x,
    w,
    second_x,
    second_w,
    out,
    expert_of_tile,
    first_row_of_tile,
    end_row_of_tile,
    num_tiles,
    num_experts,
    size_n,
    padded_k,
    stride_we,
    stride_wn,
    stride_wk,
    NUM_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column = tile_and_column(tl.program_id(0), num_tiles, tl.cdiv(size_n, BLOCK_N), GROUP)
    expert = tl.load(expert_of_tile + tile)
    if expert < 0:
        return
    first_row = tl.load(first_row_of_tile + tile)
    end_row = tl.load(end_row_of_tile + tile)
    # padding rows: a sum over nothing
    sum_size = tl.where(expert < num_experts, padded_k, 0)
    m = first_row + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows of the next expert stay unread; what stands in for them is not stored
    rows = tl.where(m < end_row, m, first_row).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_offsets = rows[:, None] * padded_k + k[None, :]
    w_offsets = expert.to(tl.int64) * stride_we + n[None, :] * stride_wn + k[:, None] * stride_wk
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = _add_product(total, x + x_offsets, w + w_offsets, sum_size, stride_wk, BLOCK_K)
    if NUM_PAIRS == 2:
        total = _add_product(total, second_x + x_offsets, second_w + w_offsets, sum_size, stride_wk, BLOCK_K)
    out_pointers = out + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(
        out_pointers, total.to(out.dtype.element_ty), mask=(m < end_row)[:, None] & (n < size_n)[None, :]
    )


@triton.jit
def _add_product(total, x_pointers, w_pointers, sum_size, stride_wk, BLOCK_K: tl.constexpr):
    """total + the product of the tiles that begin at the pointers, summed over `sum_size`."""
    for _ in range(0, sum_size, BLOCK_K):
        total = tl.dot(tl.load(x_pointers), tl.load(w_pointers), total)
        x_pointers += BLOCK_K
        w_pointers += BLOCK_K * stride_wk
    return total


@triton.jit
def _weight_gradient_kernel(
    grad,
    x,
    out,
    offsets,
    size_n,
    size_k,
    padded_n,
    padded_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_blocks_n, num_blocks_k = padded_n // BLOCK_N, padded_k // BLOCK_K
    program = tl.program_id(0)
    expert = program // (num_blocks_n * num_blocks_k)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    n = (program // num_blocks_k) % num_blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = program % num_blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(start, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        rows = m.to(tl.int64)[:, None]
        is_row = (m < end)[:, None]
        grad_tile = tl.load(grad + rows * padded_n + n[None, :], mask=is_row, other=0.0)
        x_tile = tl.load(x + rows * padded_k + k[None, :], mask=is_row, other=0.0)
        total = tl.dot(tl.trans(grad_tile), x_tile, total)
    out_pointers = out + expert.to(tl.int64) * size_n * size_k + n[:, None] * size_k + k[None, :]
    tl.store(out_pointers, total.to(out.dtype.element_ty), mask=(n < size_n)[:, None] & (k < size_k)[None, :])
