"""The experts by torch's own products, in the dtype handed over: what `native` and `bf16` run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.compute.node import Backward, ExpertMlp, ExpertNode, Forward
from afmoe.moe.grouped_mm import (
    CompiledProducts,
    ExpertWeights,
    RowSource,
    RunProducts,
    TorchProducts,
    backward_by_grouped_mm,
    backward_by_segments,
    forward_by_grouped_mm,
    forward_by_segments,
    product_dtype,
)

if TYPE_CHECKING:
    from afmoe.moe.cpu_kernels.kernels import CpuKernels


class GroupedExperts:
    """`by_segments` on a CPU, `by_grouped_mm` on a GPU; `afmoe.moe.grouped_mm` tells both."""

    def __init__(self, activation: Activation, kernels: CpuKernels | None = None) -> None:
        self.by_segments = ExpertNode(SegmentsMlp(activation, kernels))
        self._grouped_mm = ExpertNode(GroupedMlp(activation))

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None = None
    ) -> Tensor:
        """activation.hidden(x @ gate.T, x @ up.T) @ down.T per expert. Contract: `afmoe.moe.compute`."""
        dtype = product_dtype(x_RD)
        multiply = self.by_grouped_mm if x_RD.is_cuda else self.by_segments
        return multiply(x_RD.to(dtype), offsets_L, weights.to(dtype), source)

    def by_grouped_mm(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None = None
    ) -> Tensor:
        """By `torch.nn.functional.grouped_mm`: bf16, fp16 or fp32, all operands alike.

        In bf16 on GPUs of sm_90 and sm_100 the offsets stay on the device. Elsewhere torch itself reads them
        on the host and loops over the experts (aten/src/ATen/native/cuda/GroupedBlas.cpp, torch 2.10).
        """
        hidden_size, intermediate_size = x_RD.shape[1], weights.up_LFD.shape[1]
        # rows of every operand must start at multiples of 16 bytes; zero columns change no product
        multiple = 16 // x_RD.element_size()
        pad_hidden, pad_intermediate = -hidden_size % multiple, -intermediate_size % multiple
        if pad_hidden or pad_intermediate:
            x_RD = F.pad(x_RD, (0, pad_hidden))
            weights = weights.padded(pad_hidden, pad_intermediate)
            # the padded rows are another tensor than the one that the source gives
            source = None
        y_RD = self._grouped_mm(x_RD, offsets_L, weights, source)
        return y_RD[:, :hidden_size] if pad_hidden else y_RD

    def on_weights_updated(self) -> None:
        """Nothing is derived from the weights."""


@dataclass(frozen=True)
class GroupedMlp(ExpertMlp):
    """Saved for backward: the products before the activation, gate's (where there is one) and up's."""

    activation: Activation
    form = "products of x"

    def forward(self, given: Forward, stored: None) -> tuple[Tensor, list[Tensor]]:
        return forward_by_grouped_mm(given.x_RD, given.weights, given.offsets_L, self.activation)

    def saved_like(self, given: Forward) -> list[Tensor]:
        return products_like(given)

    def backward(self, given: Backward, stored: None) -> list[Tensor | None]:
        grad_y_RD, rows, saved, weights, offsets_L, needed = given
        return backward_by_grouped_mm(
            grad_y_RD, rows, list(saved), weights, offsets_L, self.activation, list(needed)
        )


@dataclass(frozen=True)
class SegmentsMlp(ExpertMlp):
    """Saved for backward: as `GroupedMlp`."""

    activation: Activation
    kernels: CpuKernels | None
    """For fp32; None: torch multiplies."""
    form = "products of x"

    def forward(self, given: Forward, stored: None) -> tuple[Tensor, list[Tensor]]:
        products = self._products(given.x_RD)
        return forward_by_segments(given.x_RD, given.weights, given.offsets_L, self.activation, products)

    def saved_like(self, given: Forward) -> list[Tensor]:
        return products_like(given)

    def backward(self, given: Backward, stored: None) -> list[Tensor | None]:
        grad_y_RD, rows, saved, weights, offsets_L, needed = given
        return backward_by_segments(
            grad_y_RD,
            rows,
            list(saved),
            weights,
            offsets_L,
            self.activation,
            list(needed),
            self._products(grad_y_RD),
        )

    def _products(self, rows_RD: Tensor) -> RunProducts:
        if self.kernels is None or rows_RD.dtype != torch.float32 or rows_RD.is_cuda:
            return TorchProducts()
        return CompiledProducts(self.kernels)


def products_like(given: Forward) -> list[Tensor]:
    """Empty tensors [R, F] for the products of x, gate's (where there is one) and up's."""
    num_rows = given.x_RD.shape[0]
    return [given.x_RD.new_empty(num_rows, weight.shape[1]) for weight, _ in given.weights.first]
