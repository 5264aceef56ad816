# pyright: reportMissingImports=false
# (triton is an optional package)
"""How the kernels of every format are launched: grids, the arguments they share, warps and stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.products import Stored

BLOCK = TILE_ROWS
"""Rows and columns of a product's tile, and the block of fp8's scales."""
_SHARED_MEMORY_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_SHARED_MEMORY_KIB_ELSEWHERE = 99
# Eight warps keep a 128 x 128 fp32 sum in registers beside the one that fp8 promotes; four spill
# (ahead of time for sm_90: 320 bytes of stack)
_NUM_WARPS = 8
# 16 warps need 126 registers each for the 128 x 128 tile and both copies of it, 8 need 232: as many programs
# fit on a multiprocessor, with twice the warps
_QUANTIZER_WARPS = 16
_MOST_STAGES, _FEWEST_STAGES = 4, 3
# `enable_fp_fusion` is said at each launch, because its default changes in triton 3.10: scaling and adding a
# partial sum is one instruction with it, and no quantizer multiplies and adds


def launch_multiply(
    kernel: Any,
    pairs: Sequence[tuple[Stored, Stored]],
    layout: TileLayout,
    out_RN: Tensor,
    *sizes: int,
    **options: Any,
) -> Tensor:
    """`Products.multiply` by a format's kernel; `sizes` and `options` are what it takes besides."""
    (first, first_weight), (second, second_weight) = pairs[0], pairs[-1]
    size_n = out_RN.shape[1]
    kernel[(layout.num_tiles * triton.cdiv(size_n, BLOCK),)](
        *first,
        *first_weight,
        *second,
        *second_weight,
        out_RN,
        layout.tiles,
        layout.num_tiles,
        layout.num_experts,
        size_n,
        *sizes,
        NUM_PAIRS=len(pairs),
        **options,
    )
    return out_RN


def launch_weight_gradient(
    kernel: Any,
    grad_columns: Stored,
    x_columns: Stored,
    rows_of_expert: Tensor,
    out_LNK: Tensor,
    *sizes: int,
    **options: Any,
) -> Tensor:
    """`Products.weight_gradient` by a format's kernel, which finds an expert's rows in `rows_of_expert`."""
    num_experts, size_n, size_k = out_LNK.shape
    kernel[(num_experts * triton.cdiv(size_n, BLOCK) * triton.cdiv(size_k, BLOCK),)](
        *grad_columns,
        *x_columns,
        out_LNK,
        rows_of_expert,
        size_n,
        size_k,
        *sizes,
        **options,
    )
    return out_LNK


def launch_row_quantizer(
    kernel: Any, x_RK: Tensor, layout: TileLayout, row_copy: Stored, column_copy: Stored, **constants: Any
) -> None:
    """Write the copies that are not empty; a kernel is given both, and told which of them it has to write."""
    if not row_copy and not column_copy:
        return
    num_rows, size_k = x_RK.shape
    kernel[(layout.num_tiles * triton.cdiv(size_k, BLOCK),)](
        x_RK,
        *(row_copy or column_copy),
        *(column_copy or row_copy),
        layout.tiles,
        layout.num_tiles,
        layout.num_experts,
        num_rows,
        size_k,
        WITH_ROWS=bool(row_copy),
        WITH_COLUMNS=bool(column_copy),
        **constants,
        **quantizer_options(),
    )


def launch_weight_quantizer(
    kernel: Any, w_LNK: Tensor, forward: Stored, transposed: Stored, **constants: Any
) -> None:
    """Write `forward`, and `transposed` unless it is empty."""
    num_experts, size_n, size_k = w_LNK.shape
    kernel[(num_experts * triton.cdiv(size_n, BLOCK) * triton.cdiv(size_k, BLOCK),)](
        w_LNK,
        *forward,
        *(transposed or forward),
        size_n,
        size_k,
        WITH_TRANSPOSED=bool(transposed),
        **constants,
        **quantizer_options(),
    )


def product_options(bytes_per_stage: int, *, fits_twice: bool = False) -> dict[str, Any]:
    """Launch options of a product whose operands take `bytes_per_stage` for each step of its loop.

    `fits_twice`: its registers let two programs run on a multiprocessor. Where the shared memory does too,
    one computes while the other begins or stores: a tile of Mini has 16 or 32 steps of 64, and one program
    alone would leave the tensor cores idle before the first and after the last.
    """
    stages = shared_memory_kib() * 1024 // bytes_per_stage
    if fits_twice and stages >= 2 * _FEWEST_STAGES:
        stages //= 2
    return {"num_warps": _NUM_WARPS, "num_stages": min(_MOST_STAGES, stages), "enable_fp_fusion": True}


def quantizer_options() -> dict[str, Any]:
    """Launch options of a kernel that holds one 128 x 128 tile in registers."""
    return {"num_warps": _QUANTIZER_WARPS, "enable_fp_fusion": True}


def shared_memory_kib() -> int:
    """What one program may use on the current GPU (CUDA C++ Programming Guide, compute capabilities)."""
    if knobs.runtime.interpret:
        return _SHARED_MEMORY_KIB_ELSEWHERE
    target = driver.active.get_current_target()
    assert target is not None
    return _SHARED_MEMORY_KIB.get(target.arch, _SHARED_MEMORY_KIB_ELSEWHERE)


def padded(size: int) -> int:
    """`size` up to whole blocks: quantized operands are stored so, with codes of zero behind the values."""
    return triton.cdiv(size, BLOCK) * BLOCK
