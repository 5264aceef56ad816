# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Grouped products of fp8 operands: e4m3 codes with scales of 1 x 128, 128 x 1 and 128 x 128 blocks.

The sum over 128 codes is the tensor core's; it is scaled and added up in fp32 registers. That is the
contract's arithmetic, and it bounds what Hopper's narrower accumulator loses (DeepSeek-V3, arXiv 2412.19437,
section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from afmoe.moe.compute.kernels.bf16 import Bf16Products
from afmoe.moe.compute.kernels.fp8_quantize import quantize_activations, quantize_weights
from afmoe.moe.compute.kernels.launch import BLOCK, GROUP, padded, product_grid, product_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout, tile_and_column
from afmoe.moe.compute.kernels.products import Stored, Weight

_BYTES_PER_STAGE = BLOCK * (TILE_ROWS + BLOCK)


class Fp8Products:
    """`afmoe.moe.quantization`'s fp8: `scales` fp32 or ue8m0; weight gradients of fp8 or bf16 operands."""

    def __init__(self, scales: str, wgrad: str) -> None:
        self.powers_of_two = scales == "ue8m0"
        self.bf16 = Bf16Products() if wgrad == "bf16" else None
        self.columns_are_rows = self.bf16 is not None

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight:
        return quantize_weights(w_LNK, powers_of_two=self.powers_of_two, transposed=transposed)

    def store(self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool) -> tuple[Stored, Stored]:
        row_copy, column_copy = quantize_activations(
            x_RK,
            layout,
            powers_of_two=self.powers_of_two,
            rows=rows,
            columns=columns and self.bf16 is None,
        )
        if columns and self.bf16 is not None:
            _, column_copy = self.bf16.store(x_RK, layout, rows=False, columns=True)
        return row_copy, column_copy

    def multiply(self, pairs: Sequence[tuple[Stored, Stored]], layout: TileLayout, out_RN: Tensor) -> Tensor:
        (first, first_weight), (second, second_weight) = pairs[0], pairs[-1]
        size_n = out_RN.shape[1]
        _multiply_kernel[product_grid(layout.num_tiles, size_n)](
            *first,
            *first_weight,
            *second,
            *second_weight,
            out_RN,
            layout.expert_of_tile,
            layout.first_row_of_tile,
            layout.end_row_of_tile,
            layout.num_tiles,
            layout.num_experts,
            layout.num_rows,
            size_n,
            padded(size_n),
            first[0].shape[1],
            NUM_PAIRS=len(pairs),
            BLOCK=BLOCK,
            GROUP=GROUP,
            **product_options(_BYTES_PER_STAGE),
        )
        return out_RN

    def weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        if self.bf16 is not None:
            return self.bf16.weight_gradient(grad_columns, x_columns, layout, out_LNK)
        num_experts, size_n, size_k = out_LNK.shape
        grid = (num_experts * triton.cdiv(size_n, BLOCK) * triton.cdiv(size_k, BLOCK),)
        _weight_gradient_kernel[grid](
            *grad_columns,
            *x_columns,
            out_LNK,
            layout.first_tile_of_expert,
            size_n,
            size_k,
            layout.num_tiles * TILE_ROWS,
            BLOCK=BLOCK,
            **product_options(_BYTES_PER_STAGE),
        )
        return out_LNK


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def _multiply_kernel(
    x,
    x_scales,
    w,
    w_scales,
    second_x,
    second_x_scales,
    second_w,
    second_w_scales,
    out,
    expert_of_tile,
    first_row_of_tile,
    end_row_of_tile,
    num_tiles,
    num_experts,
    num_rows,
    size_n,
    padded_n,
    padded_k,
    NUM_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column = tile_and_column(tl.program_id(0), num_tiles, tl.cdiv(size_n, BLOCK), GROUP)
    expert = tl.load(expert_of_tile + tile)
    if expert < 0:
        return
    first_row = tl.load(first_row_of_tile + tile)
    end_row = tl.load(end_row_of_tile + tile)
    # padding rows: a sum over nothing
    num_steps = tl.where(expert < num_experts, padded_k // BLOCK, 0)
    m = first_row + tl.arange(0, BLOCK)
    n = column * BLOCK + tl.arange(0, BLOCK)
    # rows of the next expert stay unread; what stands in for them is not stored
    rows = tl.where(m < end_row, m, first_row)
    w_offset = expert.to(tl.int64) * padded_n * padded_k
    w_scale_offset = (expert * (padded_n // BLOCK) + column) * (padded_k // BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    total = _add_product(
        total,
        x,
        x_scales,
        w + w_offset,
        w_scales + w_scale_offset,
        rows,
        n,
        num_steps,
        num_rows,
        padded_k,
        BLOCK,
    )
    if NUM_PAIRS == 2:
        total = _add_product(
            total,
            second_x,
            second_x_scales,
            second_w + w_offset,
            second_w_scales + w_scale_offset,
            rows,
            n,
            num_steps,
            num_rows,
            padded_k,
            BLOCK,
        )
    out_pointers = out + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(
        out_pointers, total.to(out.dtype.element_ty), mask=(m < end_row)[:, None] & (n < size_n)[None, :]
    )


@triton.jit
def _add_product(
    total,
    x,
    x_scales,
    w,
    w_scales,
    rows,
    n,
    num_steps,
    num_rows,
    padded_k,
    BLOCK: tl.constexpr,
):
    """total[m, n] + sum over the blocks of k of (x[rows[m], k] w[n, k]) times both scales."""
    k = tl.arange(0, BLOCK)
    x_pointers = x + rows.to(tl.int64)[:, None] * padded_k + k[None, :]
    w_pointers = w + n[None, :] * padded_k + k[:, None]
    x_scale_pointers = x_scales + rows
    for step in range(num_steps):
        scale = tl.load(x_scale_pointers) * tl.load(w_scales + step)
        total += tl.dot(tl.load(x_pointers), tl.load(w_pointers)) * scale[:, None]
        x_pointers += BLOCK
        w_pointers += BLOCK
        x_scale_pointers += num_rows
    return total


@triton.jit
def _weight_gradient_kernel(
    grad,
    grad_scales,
    x,
    x_scales,
    out,
    first_tile_of_expert,
    size_n,
    size_k,
    padded_rows,
    BLOCK: tl.constexpr,
):
    num_blocks_n = tl.cdiv(size_n, BLOCK)
    num_blocks_k = tl.cdiv(size_k, BLOCK)
    program = tl.program_id(0)
    expert = program // (num_blocks_n * num_blocks_k)
    n = (program // num_blocks_k) % num_blocks_n * BLOCK + tl.arange(0, BLOCK)
    k = program % num_blocks_k * BLOCK + tl.arange(0, BLOCK)
    first_tile = tl.load(first_tile_of_expert + expert)
    end_tile = tl.load(first_tile_of_expert + expert + 1)
    slot = (first_tile * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    grad_pointers = grad + n.to(tl.int64)[:, None] * padded_rows + slot[None, :]
    x_pointers = x + k.to(tl.int64)[None, :] * padded_rows + slot[:, None]
    scales_n, scales_k = num_blocks_n * BLOCK, num_blocks_k * BLOCK
    grad_scale_pointers = grad_scales + first_tile.to(tl.int64) * scales_n + n
    x_scale_pointers = x_scales + first_tile.to(tl.int64) * scales_k + k
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(first_tile, end_tile):
        product = tl.dot(tl.load(grad_pointers), tl.load(x_pointers))
        total += product * tl.load(grad_scale_pointers)[:, None] * tl.load(x_scale_pointers)[None, :]
        grad_pointers += BLOCK
        x_pointers += BLOCK
        grad_scale_pointers += scales_n
        x_scale_pointers += scales_k
    out_pointers = out + expert.to(tl.int64) * size_n * size_k + n[:, None] * size_k + k[None, :]
    tl.store(out_pointers, total.to(out.dtype.element_ty), mask=(n < size_n)[:, None] & (k < size_k)[None, :])
