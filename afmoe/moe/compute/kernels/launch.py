# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""How a product is launched: warps, and as many stages of asynchronous copies as the shared memory holds."""

from __future__ import annotations

import triton
from triton import knobs
from triton.runtime import driver

from afmoe.moe.compute.kernels.layout import TILE_ROWS

BLOCK = 128
"""Rows and columns of a product's tile, and the block of fp8's scales."""
GROUP = 8
"""Row tiles that run side by side on the same columns of the weights."""
_SHARED_MEMORY_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_SHARED_MEMORY_KIB_ELSEWHERE = 99
# Eight warps keep a 128 x 128 fp32 sum in registers beside the one that fp8 promotes; four spill
# (ahead of time for sm_90: 320 bytes of stack)
_NUM_WARPS = 8
# 16 warps need 126 registers each for the 128 x 128 tile and both copies of it, 8 need 232: as many programs
# fit on a multiprocessor, with twice the warps
_QUANTIZER_WARPS = 16
_MOST_STAGES = 4
# `enable_fp_fusion` is said at each launch, because its default changes in triton 3.10: scaling and adding a
# partial sum is one instruction with it, and no quantizer multiplies and adds


def product_options(num_bytes_per_stage: int) -> dict[str, int]:
    """Launch options of a product whose operands take `num_bytes_per_stage` for each step of its loop."""
    num_stages = min(_MOST_STAGES, shared_memory_kib() * 1024 // num_bytes_per_stage)
    return {"num_warps": _NUM_WARPS, "num_stages": num_stages, "enable_fp_fusion": True}


def quantizer_options() -> dict[str, int]:
    """Launch options of a kernel that holds one 128 x 128 tile in registers."""
    return {"num_warps": _QUANTIZER_WARPS, "enable_fp_fusion": True}


def shared_memory_kib() -> int:
    """What one program may use on the current GPU (CUDA C++ Programming Guide, compute capabilities)."""
    if knobs.runtime.interpret:
        return _SHARED_MEMORY_KIB_ELSEWHERE
    target = driver.active.get_current_target()
    assert target is not None
    return _SHARED_MEMORY_KIB.get(target.arch, _SHARED_MEMORY_KIB_ELSEWHERE)


def product_grid(num_tiles: int, num_columns: int) -> tuple[int]:
    return (num_tiles * triton.cdiv(num_columns, BLOCK),)


def padded(size: int) -> int:
    """`size` up to whole blocks: quantized operands are stored so, with codes of zero behind the values."""
    return triton.cdiv(size, BLOCK) * BLOCK


assert TILE_ROWS == BLOCK
