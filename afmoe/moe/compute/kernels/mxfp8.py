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

from afmoe.moe.compute.kernels.bf16 import Bf16Products
from afmoe.moe.compute.kernels.launch import BLOCK, GROUP, padded, product_grid, product_options
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout, tile_and_column
from afmoe.moe.compute.kernels.mxfp8_quantize import quantize_mx_activations, quantize_mx_weights
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.quantization import MX_BLOCK_SIZE

_BYTES_PER_STAGE = (BLOCK + BLOCK // MX_BLOCK_SIZE) * (TILE_ROWS + BLOCK)


class Mxfp8Products:
    """`afmoe.moe.quantization`'s mxfp8; weight gradients of mxfp8 or bf16 operands."""

    def __init__(self, wgrad: str = "mxfp8") -> None:
        self.bf16 = Bf16Products() if wgrad == "bf16" else None
        self.columns_are_rows = self.bf16 is not None

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight:
        return quantize_mx_weights(w_LNK, transposed=transposed)

    def store(self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool) -> tuple[Stored, Stored]:
        row_copy, column_copy = quantize_mx_activations(
            x_RK, layout, rows=rows, columns=columns and self.bf16 is None
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
            size_n,
            padded(size_n),
            first[0].shape[1],
            NUM_PAIRS=len(pairs),
            BLOCK=BLOCK,
            MX_BLOCK=MX_BLOCK_SIZE,
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
            MX_BLOCK=MX_BLOCK_SIZE,
            **product_options(_BYTES_PER_STAGE),
        )
        return out_LNK


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
    expert_of_tile,
    first_row_of_tile,
    end_row_of_tile,
    num_tiles,
    num_experts,
    size_n,
    padded_n,
    padded_k,
    NUM_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    MX_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column = tile_and_column(tl.program_id(0), num_tiles, tl.cdiv(size_n, BLOCK), GROUP)
    expert = tl.load(expert_of_tile + tile)
    if expert < 0:
        return
    first_row = tl.load(first_row_of_tile + tile)
    end_row = tl.load(end_row_of_tile + tile)
    # padding rows: a sum over nothing
    is_expert = expert < num_experts
    num_steps = tl.where(is_expert, padded_k // BLOCK, 0)
    m = first_row + tl.arange(0, BLOCK)
    n = column * BLOCK + tl.arange(0, BLOCK)
    # rows of the next expert stay unread; what stands in for them is not stored
    rows = tl.where(m < end_row, m, first_row).to(tl.int64)
    w_rows = expert.to(tl.int64) * padded_n + n
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    total = _add_product(
        total, x, x_exponents, rows, w, w_exponents, w_rows, num_steps, padded_k, BLOCK, MX_BLOCK
    )
    if NUM_PAIRS == 2:
        total = _add_product(
            total,
            second_x,
            second_x_exponents,
            rows,
            second_w,
            second_w_exponents,
            w_rows,
            num_steps,
            padded_k,
            BLOCK,
            MX_BLOCK,
        )
    out_pointers = out + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(
        out_pointers, total.to(out.dtype.element_ty), mask=(m < end_row)[:, None] & (n < size_n)[None, :]
    )


@triton.jit
def _weight_gradient_kernel(
    grad,
    grad_exponents,
    x,
    x_exponents,
    out,
    first_tile_of_expert,
    size_n,
    size_k,
    padded_rows,
    BLOCK: tl.constexpr,
    MX_BLOCK: tl.constexpr,
):
    num_blocks_n = tl.cdiv(size_n, BLOCK)
    num_blocks_k = tl.cdiv(size_k, BLOCK)
    program = tl.program_id(0)
    expert = program // (num_blocks_n * num_blocks_k)
    n = (program // num_blocks_k) % num_blocks_n * BLOCK + tl.arange(0, BLOCK)
    k = program % num_blocks_k * BLOCK + tl.arange(0, BLOCK)
    first_tile = tl.load(first_tile_of_expert + expert)
    end_tile = tl.load(first_tile_of_expert + expert + 1)
    total = _add_product(
        tl.zeros((BLOCK, BLOCK), tl.float32),
        grad + first_tile * BLOCK,
        grad_exponents + first_tile * (BLOCK // MX_BLOCK),
        n.to(tl.int64),
        x + first_tile * BLOCK,
        x_exponents + first_tile * (BLOCK // MX_BLOCK),
        k.to(tl.int64),
        end_tile - first_tile,
        padded_rows,
        BLOCK,
        MX_BLOCK,
    )
    out_pointers = out + expert.to(tl.int64) * size_n * size_k + n[:, None] * size_k + k[None, :]
    tl.store(out_pointers, total.to(out.dtype.element_ty), mask=(n < size_n)[:, None] & (k < size_k)[None, :])


@triton.jit
def _add_product(
    total,
    a,
    a_exponents,
    a_rows,
    b,
    b_exponents,
    b_rows,
    num_steps,
    row_size,
    BLOCK: tl.constexpr,
    MX_BLOCK: tl.constexpr,
):
    """total[i, j] + the product of rows a_rows[i] and b_rows[j] over `num_steps` blocks of 128 codes."""
    NUM: tl.constexpr = BLOCK // MX_BLOCK
    code = tl.arange(0, BLOCK)
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
        a_pointers += BLOCK
        b_pointers += BLOCK
        a_scale_pointers += NUM
        b_scale_pointers += NUM
    return total
