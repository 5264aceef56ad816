"""The kernels, called with tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from afmoe.moe.cpu_kernels.library import load_library

_POINTER, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def cpu_kernels() -> CpuKernels:
    """Raises `MachineError` where they cannot be built or loaded."""
    return CpuKernels(load_library())


class CpuKernels:
    """fp32 tensors on the CPU, columns adjacent unless said otherwise; torch's number of threads.

    `experts_N3` is an int64 table: expert, first row, row after the last. What it holds is not judged here.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._multiply = library.afmoe_multiply
        self._multiply.argtypes = (
            *(_POINTER, _SIZE),
            *(_POINTER, _SIZE, _SIZE, _SIZE),
            *(_POINTER, _SIZE),
            *(_POINTER, _SIZE, _SIZE, _SIZE, _FLAG, _FLAG),
        )
        self._weight_gradient = library.afmoe_weight_gradient
        self._weight_gradient.argtypes = (
            *(_POINTER, _SIZE),
            *(_POINTER, _SIZE),
            _POINTER,
            *(_POINTER, _SIZE, _SIZE, _SIZE, _FLAG),
        )
        self._round_tiles = library.afmoe_round_tiles
        self._round_tiles.argtypes = (
            *(_POINTER, _SIZE, _SIZE),
            _POINTER,
            *(_SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _FLAG, _FLAG),
        )
        self._round_columns = library.afmoe_round_columns
        self._round_columns.argtypes = (
            *(_POINTER, _SIZE),
            *(_POINTER, _SIZE),
            *(_POINTER, _SIZE, _SIZE, _SIZE, _FLAG, _FLAG),
        )
        for function in (self._multiply, self._weight_gradient, self._round_tiles, self._round_columns):
            function.restype = None

    def __reduce__(self) -> Any:
        # a copy or a pickle of a model takes those of its machine
        return cpu_kernels, ()

    def multiply(
        self,
        x_RK: Tensor,
        w_LKN: Tensor,
        experts_N3: Tensor,
        *,
        out_RN: Tensor,
        accumulate: bool = False,
    ) -> None:
        """out[rows] = x[rows] @ w[e] for each expert, or out += that.

        w may have any strides: fast are adjacent columns, and [L, N, K] turned around.
        """
        depth, columns = w_LKN.shape[1:]
        expert, row, column = w_LKN.stride()
        _check(x_RK.shape[1] == depth and out_RN.shape == (x_RK.shape[0], columns), x_RK, out_RN)
        _check(w_LKN.dtype == torch.float32 and w_LKN.device.type == "cpu")
        self._multiply(
            *(x_RK.data_ptr(), x_RK.stride(0)),
            *(w_LKN.data_ptr(), expert, row, column),
            *(out_RN.data_ptr(), out_RN.stride(0)),
            *(_table(experts_N3), len(experts_N3), depth, columns, accumulate, torch.get_num_threads()),
        )

    def weight_gradient(self, grad_RN: Tensor, x_RK: Tensor, experts_N3: Tensor, *, out_LNK: Tensor) -> None:
        """out[e] = grad[rows].T @ x[rows] for each expert; exactly zero for one without rows."""
        rows, columns = grad_RN.shape[1], x_RK.shape[1]
        _check(out_LNK.is_contiguous() and out_LNK.shape[1:] == (rows, columns), grad_RN, x_RK, out_LNK)
        _check(grad_RN.shape[0] == x_RK.shape[0])
        self._weight_gradient(
            *(grad_RN.data_ptr(), grad_RN.stride(0)),
            *(x_RK.data_ptr(), x_RK.stride(0)),
            out_LNK.data_ptr(),
            *(_table(experts_N3), len(experts_N3), rows, columns, torch.get_num_threads()),
        )

    def round_tiles(
        self, x_MRK: Tensor, block: tuple[int, int], *, powers_of_two: bool, out_MRK: Tensor
    ) -> None:
        """e4m3 values of each matrix, one scale for each `block` (rows, columns)."""
        _check(out_MRK.is_contiguous() and out_MRK.shape == x_MRK.shape, x_MRK, out_MRK)
        self._round_tiles(
            *(x_MRK.data_ptr(), x_MRK.stride(0), x_MRK.stride(1)),
            out_MRK.data_ptr(),
            *(*x_MRK.shape, *block, powers_of_two, torch.get_num_threads()),
        )

    def round_columns(
        self, x_RK: Tensor, segments_N3: Tensor, block_size: int, *, powers_of_two: bool, out_RK: Tensor
    ) -> None:
        """e4m3 values of each segment's rows in blocks down the rows, which start again at each."""
        _check(out_RK.shape == x_RK.shape, x_RK, out_RK)
        self._round_columns(
            *(x_RK.data_ptr(), x_RK.stride(0)),
            *(out_RK.data_ptr(), out_RK.stride(0)),
            *(_table(segments_N3), len(segments_N3), x_RK.shape[1], block_size, powers_of_two),
            torch.get_num_threads(),
        )


def _table(experts_N3: Tensor) -> int:
    is_table = experts_N3.dtype == torch.int64 and experts_N3.device.type == "cpu"
    _check(is_table and experts_N3.is_contiguous())
    return experts_N3.data_ptr()


def _check(is_right: bool, *tensors: Tensor) -> None:
    """A mistake of the caller, which would read or write beyond a tensor: refused under `python -O` too."""
    if not is_right:
        raise ValueError("these tensors do not fit each other or the kernel")
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"the kernels are for fp32 on a CPU, got {tensor.dtype} on {tensor.device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
            raise ValueError(f"columns must be adjacent, got strides {tensor.stride()}")
