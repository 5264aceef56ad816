# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Inside the kernels of every format: which 128 x 128 tile a program works on, how it is read and stored.

Programs are numbered in one dimension, so that neighbours share what they read: products the weights of a
group of row tiles, weight gradients the rows of an expert, quantizers whole rows of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afmoe.moe.compute.kernels.layout import TILE_ROWS

TILE = tl.constexpr(TILE_ROWS)
# row tiles that run side by side on the same columns of the weights
_GROUP = tl.constexpr(8)


@triton.jit
def row_tile(tiles, num_tiles, tile):
    """Expert, first row and end row of a tile of `afmoe.moe.compute.kernels.layout`."""
    return tl.load(tiles + tile), tl.load(tiles + num_tiles + tile), tl.load(tiles + 2 * num_tiles + tile)


@triton.jit
def product_tile(tiles, num_tiles, size_n):
    """Expert, first row, end row and column block of the tile of a product that this program computes."""
    num_columns = tl.cdiv(size_n, TILE)
    program = tl.program_id(0)
    group = program // (_GROUP * num_columns)
    group_size = tl.minimum(num_tiles - group * _GROUP, _GROUP)
    within = program % (_GROUP * num_columns)
    expert, first_row, end_row = row_tile(tiles, num_tiles, group * _GROUP + within % group_size)
    return expert, first_row, end_row, within // group_size


@triton.jit
def rows_to_read(first_row, end_row):
    """Rows of the next expert stay unread; what stands in for them is not stored."""
    m = first_row + tl.arange(0, TILE)
    return tl.where(m < end_row, m, first_row)


@triton.jit
def gradient_tile(size_n, size_k):
    """Expert and blocks of N and K of the tile of a weight gradient that this program computes."""
    num_n, num_k = tl.cdiv(size_n, TILE), tl.cdiv(size_k, TILE)
    program = tl.program_id(0)
    return program // (num_n * num_k), program // num_k % num_n, program % num_k


@triton.jit
def store_tile(out, total, first_row, end_row, column, row_size):
    """Store the rows of the tile that lie before `end_row`; `column` counts blocks."""
    m = first_row + tl.arange(0, TILE)
    n = column * TILE + tl.arange(0, TILE)
    pointers = out + m.to(tl.int64)[:, None] * row_size + n[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(m < end_row)[:, None] & (n < row_size)[None, :])


@triton.jit
def load_tile(x, first_row, end_row, column, row_size):
    """The same tile of a matrix in fp32, zeros where it has no values."""
    m = first_row + tl.arange(0, TILE)
    n = column * TILE + tl.arange(0, TILE)
    pointers = x + m.to(tl.int64)[:, None] * row_size + n[None, :]
    values = tl.load(pointers, mask=(m < end_row)[:, None] & (n < row_size)[None, :], other=0.0)
    return values.to(tl.float32)
