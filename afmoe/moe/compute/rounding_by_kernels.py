"""The rounding of `afmoe.moe.compute.rounding` in one threaded pass of kernels in C.

A quarter of torch's time or less: 4,096 x 256 values on one thread 0.3 ms in place of 1.2 (scales=fp32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from afmoe.moe.cpu_kernels.kernels import CpuKernels
from afmoe.moe.grouped_mm import ExpertRun
from afmoe.moe.quantization import BLOCK_SIZE


class KernelRounder:
    """On a CPU."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def rows(self, x_RK: Tensor, scales: str, block_size: int) -> Tensor:
        return self._tiles(x_RK[None], scales, (1, block_size))[0]

    def weights(self, w_LNK: Tensor, scales: str) -> Tensor:
        return self._tiles(w_LNK, scales, (BLOCK_SIZE, BLOCK_SIZE))

    def weights_along_n(self, w_LNK: Tensor, scales: str, block_size: int) -> Tensor:
        num_experts, num_rows, _ = w_LNK.shape
        experts = [(e, e * num_rows, (e + 1) * num_rows) for e in range(num_experts)]
        rows = ExpertRun(slice(0, num_experts * num_rows), experts)
        return self.columns(w_LNK.flatten(0, 1), rows, scales, block_size)[0].view(w_LNK.shape)

    def columns(self, x_RK: Tensor, run: ExpertRun, scales: str, block_size: int) -> tuple[Tensor, ExpertRun]:
        x_RK = x_RK.float().contiguous()
        out_RK = torch.empty_like(x_RK)
        is_ue8m0 = scales == "ue8m0"
        self.kernels.round_columns(x_RK, run.table_N3, block_size, powers_of_two=is_ue8m0, out_RK=out_RK)
        return out_RK, run

    def _tiles(self, x_MRK: Tensor, scales: str, block: tuple[int, int]) -> Tensor:
        x_MRK = x_MRK.float().contiguous()
        out_MRK = torch.empty_like(x_MRK)
        self.kernels.round_tiles(x_MRK, block, powers_of_two=scales == "ue8m0", out_MRK=out_MRK)
        return out_MRK
