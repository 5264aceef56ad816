"""The kernels of a format called as a plugin calls them, whatever GPU they are meant for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from afmoe.moe.activations import activation_named
from afmoe.moe.compute.kernels.mlp import KernelMlp
from afmoe.moe.compute.kernels.products import Products
from afmoe.moe.compute.node import ExpertNode
from afmoe.moe.grouped_mm import ExpertWeights, RowSource


class KernelExperts:
    def __init__(self, products: Products, activation: str = "silu") -> None:
        form = f"{type(products).__name__}, columns_are_rows={products.columns_are_rows}"
        self.node = ExpertNode(KernelMlp(activation_named(activation), form, lambda: products))

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, *gate_up_down: Any, source: RowSource | None = None
    ) -> Tensor:
        return self.node(x_RD, offsets_L, ExpertWeights(*gate_up_down), source)

    def on_weights_updated(self) -> None:
        self.node.on_weights_updated()
