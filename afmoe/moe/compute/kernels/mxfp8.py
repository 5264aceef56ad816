# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Grouped products of mxfp8 operands: the tensor core applies the e8m0 scales of blocks of 32.

Native from sm_100 on. Older GPUs would get bf16 products of restored operands: the numbers without the speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from afmoe.moe.compute.kernels.launch import BLOCK, launch_multiply, launch_weight_gradient, product_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.mxfp8_quantize import (
    MX_BLOCK,
    mx_columns_like,
    quantize_mx_activations,
    quantize_mx_weights,
)
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.quantized import QuantizedProducts
from afmoe.moe.compute.kernels.tiles import TILE, gradient_tile, product_tile, rows_to_read, store_tile
from afmoe.moe.quantization import MX_BLOCK_SIZE

_BYTES_PER_STAGE = (BLOCK + BLOCK // MX_BLOCK_SIZE) * (TILE_ROWS + BLOCK)


class Mxfp8Products(QuantizedProducts):
    """`afmoe.moe.quantization`'s mxfp8; weight gradients of mxfp8 or bf16 operands."""

    def __init__(self, wgrad: str = "mxfp8") -> None:
        super().__init__(wgrad)

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight:
        return quantize_mx_weights(w_LNK, transposed=transposed)

    def quantize(
        self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool
    ) -> tuple[Stored, Stored]:
        return quantize_mx_activations(x_RK, layout, rows=rows, columns=columns)

    def quantized_columns_like(self, x_RK: Tensor, num_tiles: int) -> Stored:
        return mx_columns_like(x_RK, num_tiles)

    def multiply(self, pairs: Sequence[tuple[Stored, Stored]], layout: TileLayout, out_RN: Tensor) -> Tensor:
        (codes_RK, _), _ = pairs[0]
        return launch_multiply(
            _multiply_kernel, pairs, layout, out_RN, codes_RK.shape[1], **product_options(_BYTES_PER_STAGE)
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


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_kernel(
    x,
    x_exponents,
    w,
    w_exponents,
    second_x,
    second_x_exponents,
    second_w,
    second_w_exponents,
    out,
    tiles,
    num_tiles,
    num_experts,
    size_n,
    padded_k,
    NUM_PAIRS: tl.constexpr,
):
    expert, first_row, end_row, column = product_tile(tiles, num_tiles, size_n)
    if expert < 0:
        return
    # padding rows: a sum over nothing
    num_steps = tl.where(expert < num_experts, padded_k // TILE, 0)
    rows = rows_to_read(first_row, end_row).to(tl.int64)
    w_rows = (expert.to(tl.int64) * tl.cdiv(size_n, TILE) + column) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    total = _add_product(total, x, x_exponents, rows, w, w_exponents, w_rows, num_steps, padded_k)
    if NUM_PAIRS == 2:
        x, x_exponents, w, w_exponents = second_x, second_x_exponents, second_w, second_w_exponents
        total = _add_product(total, x, x_exponents, rows, w, w_exponents, w_rows, num_steps, padded_k)
    store_tile(out, total, first_row, end_row, column, size_n)


@triton.jit
def _weight_gradient_kernel(
    grad, grad_exponents, x, x_exponents, out, first_tile_of_expert, size_n, size_k, padded_rows
):
    expert, block_n, block_k = gradient_tile(size_n, size_k)
    first_tile = tl.load(first_tile_of_expert + expert)
    end_tile = tl.load(first_tile_of_expert + expert + 1)
    total = _add_product(
        tl.zeros((TILE, TILE), tl.float32),
        grad + first_tile * TILE,
        grad_exponents + first_tile * (TILE // MX_BLOCK),
        (block_n * TILE + tl.arange(0, TILE)).to(tl.int64),
        x + first_tile * TILE,
        x_exponents + first_tile * (TILE // MX_BLOCK),
        (block_k * TILE + tl.arange(0, TILE)).to(tl.int64),
        end_tile - first_tile,
        padded_rows,
    )
    store_tile(out + expert.to(tl.int64) * size_n * size_k, total, block_n * TILE, size_n, block_k, size_k)


@triton.jit
def _add_product(total, a, a_exponents, a_rows, b, b_exponents, b_rows, num_steps, row_size):
    """total[i, j] + the product of rows a_rows[i] and b_rows[j] over `num_steps` blocks of 128 codes."""
    NUM: tl.constexpr = TILE // MX_BLOCK
    code = tl.arange(0, TILE)
    scale = tl.arange(0, NUM)
    exponents_row_size = row_size // MX_BLOCK
    a_pointers = a + a_rows[:, None] * row_size + code[None, :]
    b_pointers = b + b_rows[None, :] * row_size + code[:, None]
    a_scale_pointers = a_exponents + a_rows[:, None] * exponents_row_size + scale[None, :]
    b_scale_pointers = b_exponents + b_rows[:, None] * exponents_row_size + scale[None, :]
    for _ in range(num_steps):
        total = tl.dot_scaled(
            tl.load(a_pointers),
            tl.load(a_scale_pointers),
            "e4m3",
            tl.load(b_pointers),
            tl.load(b_scale_pointers),
            "e4m3",
            total,
        )
        a_pointers += TILE
        b_pointers += TILE
        a_scale_pointers += NUM
        b_scale_pointers += NUM
    return total
