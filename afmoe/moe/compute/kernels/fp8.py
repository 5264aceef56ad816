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

from afmoe.moe.compute.kernels.fp8_quantize import columns_like, quantize_activations, quantize_weights
from afmoe.moe.compute.kernels.launch import BLOCK, launch_multiply, launch_weight_gradient, product_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.quantized import QuantizedProducts
from afmoe.moe.compute.kernels.tiles import TILE, gradient_tile, product_tile, rows_to_read, store_tile

_BYTES_PER_STAGE = BLOCK * (TILE_ROWS + BLOCK)


class Fp8Products(QuantizedProducts):
    """`afmoe.moe.quantization`'s fp8: `scales` fp32 or ue8m0; weight gradients of fp8 or bf16 operands."""

    def __init__(self, scales: str, wgrad: str) -> None:
        super().__init__(wgrad)
        self.powers_of_two = scales == "ue8m0"

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight:
        return quantize_weights(w_LNK, powers_of_two=self.powers_of_two, transposed=transposed)

    def quantize(
        self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool
    ) -> tuple[Stored, Stored]:
        return quantize_activations(
            x_RK, layout, powers_of_two=self.powers_of_two, rows=rows, columns=columns
        )

    def quantized_columns_like(self, x_RK: Tensor, num_tiles: int) -> Stored:
        return columns_like(x_RK, num_tiles)

    def multiply(self, pairs: Sequence[tuple[Stored, Stored]], layout: TileLayout, out_RN: Tensor) -> Tensor:
        (codes_RK, _), _ = pairs[0]
        sizes = (codes_RK.shape[1], layout.num_rows)
        return launch_multiply(
            _multiply_kernel, pairs, layout, out_RN, *sizes, **product_options(_BYTES_PER_STAGE)
        )

    def quantized_weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        return launch_weight_gradient(
            _weight_gradient_kernel,
            grad_columns,
            x_columns,
            layout.first_tile_of_expert,
            out_LNK,
            layout.num_tiles * TILE_ROWS,
            **product_options(_BYTES_PER_STAGE),
        )


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
    tiles,
    num_tiles,
    num_experts,
    size_n,
    padded_k,
    num_rows,
    NUM_PAIRS: tl.constexpr,
):
    expert, first_row, end_row, column = product_tile(tiles, num_tiles, size_n)
    if expert < 0:
        return
    # padding rows: a sum over nothing
    num_steps = tl.where(expert < num_experts, padded_k // TILE, 0)
    rows = rows_to_read(first_row, end_row)
    n = column * TILE + tl.arange(0, TILE)
    num_n, num_k = tl.cdiv(size_n, TILE), padded_k // TILE
    code, scale = expert.to(tl.int64) * (num_n * TILE) * padded_k, (expert * num_n + column) * num_k
    total = tl.zeros((TILE, TILE), tl.float32)
    total = _add_product(
        total, x, x_scales, w + code, w_scales + scale, rows, n, num_steps, num_rows, padded_k
    )
    if NUM_PAIRS == 2:
        x, x_scales, w, w_scales = second_x, second_x_scales, second_w, second_w_scales
        total = _add_product(
            total, x, x_scales, w + code, w_scales + scale, rows, n, num_steps, num_rows, padded_k
        )
    store_tile(out, total, first_row, end_row, column, size_n)


@triton.jit
def _add_product(total, x, x_scales, w, w_scales, rows, n, num_steps, num_rows, padded_k):
    """total[m, n] + sum over the blocks of k of (x[rows[m], k] w[n, k]) times both scales."""
    k = tl.arange(0, TILE)
    x_pointers = x + rows.to(tl.int64)[:, None] * padded_k + k[None, :]
    w_pointers = w + n[None, :] * padded_k + k[:, None]
    x_scale_pointers = x_scales + rows
    for step in range(num_steps):
        # before the product, which they would otherwise be waited for after
        scale = tl.load(x_scale_pointers) * tl.load(w_scales + step)
        total += tl.dot(tl.load(x_pointers), tl.load(w_pointers)) * scale[:, None]
        x_pointers += TILE
        w_pointers += TILE
        x_scale_pointers += num_rows
    return total


@triton.jit
def _weight_gradient_kernel(
    grad, grad_scales, x, x_scales, out, first_tile_of_expert, size_n, size_k, padded_rows
):
    expert, block_n, block_k = gradient_tile(size_n, size_k)
    n = block_n * TILE + tl.arange(0, TILE)
    k = block_k * TILE + tl.arange(0, TILE)
    first_tile = tl.load(first_tile_of_expert + expert)
    end_tile = tl.load(first_tile_of_expert + expert + 1)
    slot = (first_tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    grad_pointers = grad + n.to(tl.int64)[:, None] * padded_rows + slot[None, :]
    x_pointers = x + k.to(tl.int64)[None, :] * padded_rows + slot[:, None]
    padded_n, padded_k = tl.cdiv(size_n, TILE) * TILE, tl.cdiv(size_k, TILE) * TILE
    grad_scale_pointers = grad_scales + first_tile.to(tl.int64) * padded_n + n
    x_scale_pointers = x_scales + first_tile.to(tl.int64) * padded_k + k
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(first_tile, end_tile):
        # before the product, which they would otherwise be waited for after
        grad_scale, x_scale = tl.load(grad_scale_pointers), tl.load(x_scale_pointers)
        product = tl.dot(tl.load(grad_pointers), tl.load(x_pointers))
        total += product * grad_scale[:, None] * x_scale[None, :]
        grad_pointers += TILE
        x_pointers += TILE
        grad_scale_pointers += padded_n
        x_scale_pointers += padded_k
    store_tile(out + expert.to(tl.int64) * size_n * size_k, total, block_n * TILE, size_n, block_k, size_k)
