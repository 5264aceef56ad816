"""How an emulation rounds its operands: each value becomes the nearest that a code of its block stands for.

The formats and their blocks are those of `afmoe.moe.quantization`; the arithmetic is a `Rounder`'s: torch's,
or that of kernels in C. Both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from afmoe.moe.grouped_mm import ExpertRun
from afmoe.moe.quantization import BLOCK_SIZE, MX_BLOCK_SIZE


class Rounder(Protocol):
    """fp32 values, bit for bit `dequantize(quantize(x))`, of tensors of any floating dtype."""

    def rows(self, x_RK: Tensor, scales: str, block_size: int) -> Tensor:
        """In blocks of 1 x block_size."""
        ...

    def weights(self, w_LNK: Tensor, scales: str) -> Tensor:
        """In blocks of 128 x 128."""
        ...

    def weights_along_n(self, w_LNK: Tensor, scales: str, block_size: int) -> Tensor:
        """In blocks of block_size x 1."""
        ...

    def columns(self, x_RK: Tensor, run: ExpertRun, scales: str, block_size: int) -> tuple[Tensor, ExpertRun]:
        """In blocks of block_size x 1 that start again at each expert; and where its rows lie then."""
        ...


class Rounding(Protocol):
    """A block format for the operands of the experts' products."""

    def rows(self, x_RK: Tensor) -> Tensor:
        """For a product that sums over K."""
        ...

    def weights(self, w_LNK: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        """The weights of y = x w.T and those of dx = dy w. Without `backward` the second may be the first."""
        ...

    def columns(self, x_RK: Tensor, run: ExpertRun) -> tuple[Tensor, ExpertRun]:
        """For a product that sums over each expert's rows, and where these lie in the result."""
        ...


@dataclass(frozen=True)
class Fp8Rounding:
    """1 x 128 rows, 128 x 128 weights: one copy serves both products."""

    rounder: Rounder
    scales: str

    def rows(self, x_RK: Tensor) -> Tensor:
        return self.rounder.rows(x_RK, self.scales, BLOCK_SIZE)

    def weights(self, w_LNK: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        rounded_LNK = self.rounder.weights(w_LNK, self.scales)
        return rounded_LNK, rounded_LNK

    def columns(self, x_RK: Tensor, run: ExpertRun) -> tuple[Tensor, ExpertRun]:
        return self.rounder.columns(x_RK, run, self.scales, BLOCK_SIZE)


@dataclass(frozen=True)
class Mxfp8Rounding:
    """1 x 32 rows and weights, along the dimension that a product sums over."""

    rounder: Rounder

    def rows(self, x_RK: Tensor) -> Tensor:
        return self.rounder.rows(x_RK, "ue8m0", MX_BLOCK_SIZE)

    def weights(self, w_LNK: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        forward_LNK = self.rows(w_LNK.flatten(0, 1)).view(w_LNK.shape)
        if not backward:
            return forward_LNK, forward_LNK
        return forward_LNK, self.rounder.weights_along_n(w_LNK, "ue8m0", MX_BLOCK_SIZE)

    def columns(self, x_RK: Tensor, run: ExpertRun) -> tuple[Tensor, ExpertRun]:
        return self.rounder.columns(x_RK, run, "ue8m0", MX_BLOCK_SIZE)
