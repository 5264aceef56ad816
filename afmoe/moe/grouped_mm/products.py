"""The products of a run of experts with host offsets: by torch, expert by expert, or by compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from afmoe.moe.grouped_mm.segments import ExpertRun

if TYPE_CHECKING:
    from afmoe.moe.cpu_kernels.kernels import CpuKernels


class RunProducts(Protocol):
    chunk_elements: int
    """Values in the widest rows of a run: what lies between its products should stay in the cache."""

    def multiply(
        self, x_RK: Tensor, w_LKN: Tensor, run: ExpertRun, *, out_RN: Tensor, accumulate: bool = False
    ) -> None:
        """out[rows] = x[rows] @ w[e] for each expert of the run, or out[rows] += that."""
        ...

    def weight_gradient(self, grad_RN: Tensor, x_RK: Tensor, run: ExpertRun, *, out_LNK: Tensor) -> None:
        """out[e] = grad[rows].T @ x[rows] for each expert of the run; exactly zero for one without rows."""
        ...


class TorchProducts:
    """`torch.mm` per expert: any dtype, any device."""

    chunk_elements = 1 << 17

    def multiply(
        self, x_RK: Tensor, w_LKN: Tensor, run: ExpertRun, *, out_RN: Tensor, accumulate: bool = False
    ) -> None:
        for e, start, end in run.busy:
            out_RN[start:end].addmm_(x_RK[start:end], w_LKN[e], beta=int(accumulate))

    def weight_gradient(self, grad_RN: Tensor, x_RK: Tensor, run: ExpertRun, *, out_LNK: Tensor) -> None:
        for e, start, end in run.experts:
            torch.mm(grad_RN[start:end].t(), x_RK[start:end], out=out_LNK[e])


class CompiledProducts:
    """`afmoe.moe.cpu_kernels`, all experts of the run in one call: fp32 on a CPU."""

    # a call shares its experts among the threads, so there must be many
    chunk_elements = 1 << 19

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def multiply(
        self, x_RK: Tensor, w_LKN: Tensor, run: ExpertRun, *, out_RN: Tensor, accumulate: bool = False
    ) -> None:
        self.kernels.multiply(x_RK, w_LKN, run.table_N3, out_RN=out_RN, accumulate=accumulate)

    def weight_gradient(self, grad_RN: Tensor, x_RK: Tensor, run: ExpertRun, *, out_LNK: Tensor) -> None:
        self.kernels.weight_gradient(grad_RN, x_RK, run.table_N3, out_LNK=out_LNK)
