# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Grouped products of bf16 operands, summed in fp32.

Operands are stored with zeros up to multiples of 128 along N and K, so that every load is whole and aligned;
where the sizes are such multiples, as in all published models, nothing is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from afmoe.moe.compute.kernels.launch import (
    BLOCK,
    launch_multiply,
    launch_weight_gradient,
    padded,
    product_options,
)
from afmoe.moe.compute.kernels.layout import TileLayout
from afmoe.moe.compute.kernels.products import Stored, Weight
from afmoe.moe.compute.kernels.tiles import TILE, gradient_tile, product_tile, rows_to_read, store_tile

_STEP = 64
_BYTES_PER_STAGE = 2 * _STEP * (BLOCK + BLOCK)


class Bf16Products:
    """Operands are rounded to bf16, where they are not bf16 already."""

    columns_are_rows = True

    def __init__(self, *, fits_twice: bool = True) -> None:
        self.fits_twice = fits_twice

    @property
    def options(self) -> dict[str, Any]:
        # at most 128 registers with eight warps, ahead of time for sm_90 and sm_100
        return product_options(_BYTES_PER_STAGE, fits_twice=self.fits_twice)

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight:
        w_LNK = _stored(w_LNK, num_dims=2)
        return Weight(forward=(w_LNK,), transposed=(w_LNK.transpose(1, 2),) if transposed else ())

    def store(self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool) -> tuple[Stored, Stored]:
        x_RK = _stored(x_RK, num_dims=1)
        return ((x_RK,) if rows else ()), ((x_RK,) if columns else ())

    def columns_like(self, x_RK: Tensor, num_tiles: int) -> Stored:
        num_rows, size_k = x_RK.shape
        return (x_RK.new_empty(num_rows, padded(size_k), dtype=torch.bfloat16),)

    def multiply(self, pairs: Sequence[tuple[Stored, Stored]], layout: TileLayout, out_RN: Tensor) -> Tensor:
        (x_RK,), (w_LNK,) = pairs[0]
        sizes = (x_RK.shape[1], *w_LNK.stride())
        return launch_multiply(_multiply_kernel, pairs, layout, out_RN, *sizes, STEP=_STEP, **self.options)

    def weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        return launch_weight_gradient(
            _weight_gradient_kernel,
            grad_columns,
            x_columns,
            layout.offsets_L,
            out_LNK,
            STEP=_STEP,
            **self.options,
        )


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
    tiles,
    num_tiles,
    num_experts,
    size_n,
    padded_k,
    stride_we,
    stride_wn,
    stride_wk,
    NUM_PAIRS: tl.constexpr,
    STEP: tl.constexpr,
):
    expert, first_row, end_row, column = product_tile(tiles, num_tiles, size_n)
    if expert < 0:
        return
    # padding rows: a sum over nothing
    sum_size = tl.where(expert < num_experts, padded_k, 0)
    rows = rows_to_read(first_row, end_row).to(tl.int64)
    n = column * TILE + tl.arange(0, TILE)
    k = tl.arange(0, STEP)
    x_offsets = rows[:, None] * padded_k + k[None, :]
    w_offsets = expert.to(tl.int64) * stride_we + n[None, :] * stride_wn + k[:, None] * stride_wk
    total = tl.zeros((TILE, TILE), tl.float32)
    # one loop over both pairs: the copies of the second begin while the first is multiplied
    for first in range(0, NUM_PAIRS * sum_size, STEP):
        if NUM_PAIRS == 2:
            is_second = first >= sum_size
            x_step, w_step = tl.where(is_second, second_x, x), tl.where(is_second, second_w, w)
            first_k = tl.where(is_second, first - sum_size, first)
        else:
            x_step, w_step, first_k = x, w, first
        x_tile = tl.load(x_step + first_k + x_offsets)
        w_tile = tl.load(w_step + first_k * stride_wk + w_offsets)
        total = tl.dot(x_tile, w_tile, total)
    store_tile(out, total, first_row, end_row, column, size_n)


@triton.jit
def _weight_gradient_kernel(grad, x, out, offsets, size_n, size_k, STEP: tl.constexpr):
    expert, block_n, block_k = gradient_tile(size_n, size_k)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    padded_n, padded_k = tl.cdiv(size_n, TILE) * TILE, tl.cdiv(size_k, TILE) * TILE
    n = block_n * TILE + tl.arange(0, TILE)
    k = block_k * TILE + tl.arange(0, TILE)
    m = tl.arange(0, STEP)[:, None]
    grad_offsets, x_offsets = m * padded_n + n[None, :], m * padded_k + k[None, :]
    grad += start.to(tl.int64) * padded_n
    x += start.to(tl.int64) * padded_k
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(start, end, STEP):
        is_row = m < end - first
        grad_tile = tl.load(grad + grad_offsets, mask=is_row, other=0.0)
        x_tile = tl.load(x + x_offsets, mask=is_row, other=0.0)
        total = tl.dot(tl.trans(grad_tile), x_tile, total)
        grad += STEP * padded_n
        x += STEP * padded_k
    store_tile(out + expert.to(tl.int64) * size_n * size_k, total, block_n * TILE, size_n, block_k, size_k)
