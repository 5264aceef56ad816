"""What the products of fp8 and mxfp8 share: weight gradients whose operands may be bf16 instead."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from afmoe.moe.compute.kernels.bf16 import Bf16Products
from afmoe.moe.compute.kernels.layout import TileLayout
from afmoe.moe.compute.kernels.products import Stored


class QuantizedProducts(ABC):
    def __init__(self, wgrad: str) -> None:
        """`wgrad`: bf16, or the format's own name."""
        self.bf16 = Bf16Products() if wgrad == "bf16" else None
        self.columns_are_rows = self.bf16 is not None

    @abstractmethod
    def quantize(
        self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool
    ) -> tuple[Stored, Stored]:
        """`Products.store` in the format itself."""

    @abstractmethod
    def quantized_columns_like(self, x_RK: Tensor, num_tiles: int) -> Stored:
        """`Products.columns_like` in the format itself."""

    @abstractmethod
    def quantized_weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        """`Products.weight_gradient` in the format itself."""

    def store(self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool) -> tuple[Stored, Stored]:
        if self.bf16 is None:
            return self.quantize(x_RK, layout, rows=rows, columns=columns)
        row_copy, _ = self.quantize(x_RK, layout, rows=rows, columns=False)
        _, column_copy = self.bf16.store(x_RK, layout, rows=False, columns=columns)
        return row_copy, column_copy

    def columns_like(self, x_RK: Tensor, num_tiles: int) -> Stored:
        return (self.quantized_columns_like if self.bf16 is None else self.bf16.columns_like)(x_RK, num_tiles)

    def weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        if self.bf16 is not None:
            return self.bf16.weight_gradient(grad_columns, x_columns, layout, out_LNK)
        return self.quantized_weight_gradient(grad_columns, x_columns, layout, out_LNK)
