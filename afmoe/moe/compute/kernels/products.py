"""What a number format offers to the MLP of `afmoe.moe.compute.kernels.mlp`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from afmoe.moe.compute.kernels.layout import TileLayout

Stored = tuple[Tensor, ...]
"""An operand as its format stores it: values, or codes and scales."""


@dataclass(frozen=True)
class Weight:
    """The stacked weights of one projection, [L, N, K]."""

    forward: Stored
    """For x w.T, which sums over K."""
    transposed: Stored
    """For dy w, which sums over N; empty where no gradient will be asked for."""


class Products(Protocol):
    """The grouped products of one format: operands are stored once and used by several products."""

    @property
    def columns_are_rows(self) -> bool:
        """Whether `columns` of `store` are the rows in bf16: to keep them would be to keep the rows."""
        ...

    def store_weight(self, w_LNK: Tensor, *, transposed: bool) -> Weight: ...

    def store(self, x_RK: Tensor, layout: TileLayout, *, rows: bool, columns: bool) -> tuple[Stored, Stored]:
        """The operand of products that sum over K (rows), and of those that sum over an expert's rows
        (columns); empty where not asked for."""
        ...

    def columns_like(self, x_RK: Tensor, num_tiles: int) -> Stored:
        """Empty tensors of the shapes and dtypes of `columns`."""
        ...

    def multiply(self, pairs: Sequence[tuple[Stored, Stored]], layout: TileLayout, out_RN: Tensor) -> Tensor:
        """out = sum over the pairs (rows, weights) of rows @ weights[expert].T; one or two pairs."""
        ...

    def weight_gradient(
        self, grad_columns: Stored, x_columns: Stored, layout: TileLayout, out_LNK: Tensor
    ) -> Tensor:
        """out[e] = grad.T @ x over the rows of expert e; exactly zero where it has none."""
        ...
