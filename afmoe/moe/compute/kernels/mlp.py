"""The MLP of many experts on the kernels, forward and backward, in any format.

Importing this needs no triton: the kernels are loaded at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.compute.grouped import products_like
from afmoe.moe.compute.node import Backward, ExpertMlp, Forward
from afmoe.moe.grouped_mm import ExpertWeights

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.layout import TileLayout
    from afmoe.moe.compute.kernels.products import Products, Stored, Weight


@dataclass(frozen=True)
class KernelMlp(ExpertMlp):
    """Saved for backward: the products before the activation, and of x the copy for the weight gradients.

    In place of that copy x is kept, or where it was gathered from, if the copy would be the rows themselves;
    the hidden rows are computed again. In bf16 models that is 4 x intermediate_size bytes a row, and
    hidden_size more in fp8.
    """

    activation: Activation
    form: str
    load_products: Callable[[], Products]
    """Needs triton, which only a machine with a GPU has to have."""
    stores_weights = True

    @cached_property
    def products(self) -> Products:
        return self.load_products()

    def store(self, weights: ExpertWeights, offsets_L: Tensor | None = None) -> list[Weight]:
        """Of gate (where there is one), up and down; for one forward without what backward reads."""
        is_training = offsets_L is None
        projections = (*(weight for weight, _ in weights.first), weights.down_LDF)
        return [self.products.store_weight(weight, transposed=is_training) for weight in projections]

    def keeps_rows(self, given: Forward) -> bool:
        # bf16 rows are their own copy, and an operator must not give back what it was given
        is_copy = given.source is not None or given.x_RD.dtype == torch.bfloat16
        return super().keeps_rows(given) and self.products.columns_are_rows and is_copy

    def forward(self, given: Forward, stored: list[Weight]) -> tuple[Tensor, list[Tensor]]:
        x_RD, products, (*first, down) = given.x_RD, self.products, stored
        layout = _layout(given.offsets_L, x_RD)
        columns = given.trains_first and not self.keeps_rows(given)
        x_rows, x_columns = products.store(x_RD, layout, rows=True, columns=columns)
        results_RF = products_like(given)
        for result_RF, weight in zip(results_RF, first, strict=True):
            products.multiply([(x_rows, weight.forward)], layout, result_RF)
        hidden_RF = self.activation.hidden(*results_RF)
        hidden_rows, _ = products.store(hidden_RF, layout, rows=True, columns=False)
        y_RD = products.multiply([(hidden_rows, down.forward)], layout, x_RD.new_empty(x_RD.shape))
        return y_RD, [*results_RF, *x_columns]

    def saved_like(self, given: Forward) -> list[Tensor]:
        columns: Stored = ()
        if given.trains_first and not self.keeps_rows(given):
            # needs triton
            from afmoe.moe.compute.kernels.layout import most_tiles

            num_tiles = most_tiles(given.x_RD.shape[0], given.offsets_L.shape[0])
            columns = self.products.columns_like(given.x_RD, num_tiles)
        return [*products_like(given), *columns]

    def backward(self, given: Backward, stored: list[Weight]) -> list[Tensor | None]:
        grad_y_RD, products, (*first, down) = given.grad_y_RD, self.products, stored
        results_RF, x_columns = given.saved[: len(first)], tuple(given.saved[len(first) :])
        layout = _layout(given.offsets_L, grad_y_RD)
        needs_x, needs_gate, needs_up, needs_down, *_ = given.needed
        needs_first = [needs_gate, needs_up][-len(first) :]
        needs_hidden = needs_x or any(needs_first)

        def weight_gradient(grad: Stored, columns: Stored, weight: Tensor) -> Tensor | None:
            if not grad:
                return None
            return products.weight_gradient(grad, columns, layout, weight.new_empty(weight.shape))

        grad_y_rows, grad_y_columns = products.store(grad_y_RD, layout, rows=needs_hidden, columns=needs_down)
        grad_x_RD, grad_first = None, [None] * len(first)
        if needs_hidden:
            grad_hidden_RF = torch.empty_like(results_RF[0])
            products.multiply([(grad_y_rows, down.transposed)], layout, grad_hidden_RF)
            hidden_RF, grads_RF = self.activation.hidden_backward(grad_hidden_RF, *results_RF)
            copies = [
                products.store(grad, layout, rows=needs_x, columns=needed)
                for grad, needed in zip(grads_RF, needs_first, strict=True)
            ]
            if any(needs_first) and not x_columns:
                _, x_columns = products.store(given.rows.all(), layout, rows=False, columns=True)
            grad_first = [
                weight_gradient(columns, x_columns, weight)
                for (_, columns), (weight, _) in zip(copies, given.weights.first, strict=True)
            ]
            if needs_x:
                pairs = [(rows, weight.transposed) for (rows, _), weight in zip(copies, first, strict=True)]
                grad_x_RD = products.multiply(pairs, layout, grad_y_RD.new_empty(grad_y_RD.shape))
        else:
            hidden_RF = self.activation.hidden(*results_RF)
        _, hidden_columns = products.store(hidden_RF, layout, rows=False, columns=needs_down)
        grad_down = weight_gradient(grad_y_columns, hidden_columns, given.weights.down_LDF)
        grad_gate = grad_first[0] if len(first) == 2 else None
        return [grad_x_RD, grad_gate, grad_first[-1], grad_down, None, None, None]


def _layout(offsets_L: Tensor, rows: Tensor) -> TileLayout:
    from afmoe.moe.compute.kernels.layout import TileLayout

    return TileLayout.of(offsets_L, rows.shape[0])
