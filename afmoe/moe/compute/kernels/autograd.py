"""The gated MLP of many experts on the kernels: one autograd node, forward and backward, in any format.

Saved for backward: the copy of x for the weight gradients and the two products before the activation; the
hidden rows are computed again. In fp8 that is hidden_size + 4 x intermediate_size bytes a row in bf16 models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.moe.activations import Activation
from afmoe.moe.compute.kernels.layout import TileLayout
from afmoe.moe.compute.kernels.products import Products, Stored, Weight
from afmoe.moe.compute.weight_copies import WeightCopies


class KernelExperts:
    """The experts of one layer on the kernels of one format; weights are stored once an optimizer step."""

    def __init__(self, products: Products, activation: Activation) -> None:
        self.products = products
        self.activation = activation
        self.weight_copies = WeightCopies()

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor
    ) -> Tensor:
        """(activation(x @ gate.T) * (x @ up.T)) @ down.T per expert. Contract: `afmoe.moe.compute`.

        Gate and up product, hidden rows and y have the dtype of x; gradients that of what they belong to.
        """
        weights = (gate_LFD, up_LFD, down_LDF)
        if torch.is_grad_enabled():
            stored = self.weight_copies.of(weights, self._store_for_training)
        else:
            stored = self._store(weights, transposed=False)
        return _GatedMlp.apply(x_RD, *weights, offsets_L, self.activation, self.products, stored)

    def on_weights_updated(self) -> None:
        self.weight_copies.drop()

    def _store_for_training(self, weights: tuple[Tensor, ...]) -> list[Weight]:
        return self._store(weights, transposed=True)

    def _store(self, weights: tuple[Tensor, ...], *, transposed: bool) -> list[Weight]:
        return [self.products.store_weight(weight.detach(), transposed=transposed) for weight in weights]


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_LFD: Tensor,
        up_LFD: Tensor,
        down_LDF: Tensor,
        offsets_L: Tensor,
        activation: Activation,
        products: Products,
        weights: list[Weight],
    ) -> Tensor:
        gate, up, down = weights
        layout = TileLayout.of(offsets_L, x_RD.shape[0])
        _, needs_gate, needs_up, _ = ctx.needs_input_grad[:4]
        x_rows, x_columns = products.store(x_RD, layout, rows=True, columns=needs_gate or needs_up)
        gated_RF = x_RD.new_empty(x_RD.shape[0], gate_LFD.shape[1])
        raised_RF = torch.empty_like(gated_RF)
        products.multiply([(x_rows, gate.forward)], layout, gated_RF)
        products.multiply([(x_rows, up.forward)], layout, raised_RF)
        hidden_rows, _ = products.store(activation(gated_RF) * raised_RF, layout, rows=True, columns=False)
        y_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
        products.multiply([(hidden_rows, down.forward)], layout, y_RD)
        ctx.save_for_backward(gated_RF, raised_RF, *x_columns)
        ctx.layout, ctx.activation, ctx.products, ctx.weights = layout, activation, products, weights
        ctx.like = [(weight.shape, weight.dtype) for weight in (gate_LFD, up_LFD, down_LDF)]
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gated_RF, raised_RF, *x_columns = ctx.saved_tensors
        gate, up, down = ctx.weights
        layout: TileLayout = ctx.layout
        activation: Activation = ctx.activation
        products: Products = ctx.products
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]

        def weight_gradient(which: int, grad_columns: Stored, columns: Stored) -> Tensor:
            shape, dtype = ctx.like[which]
            out = gated_RF.new_empty(shape, dtype=dtype)
            return products.weight_gradient(grad_columns, columns, layout, out)

        grad_x_RD = grad_gate_LFD = grad_up_LFD = grad_down_LDF = None
        needs_hidden = needs_x or needs_gate or needs_up
        activated_RF = activation(gated_RF)
        grad_y_rows, grad_y_columns = products.store(grad_y_RD, layout, rows=needs_hidden, columns=needs_down)
        if needs_down:
            _, hidden_columns = products.store(activated_RF * raised_RF, layout, rows=False, columns=True)
            grad_down_LDF = weight_gradient(2, grad_y_columns, hidden_columns)
        if needs_hidden:
            grad_hidden_RF = torch.empty_like(gated_RF)
            products.multiply([(grad_y_rows, down.transposed)], layout, grad_hidden_RF)
            grad_raised_RF = activated_RF.mul_(grad_hidden_RF)
            grad_gated_RF = activation.backward(grad_hidden_RF.mul_(raised_RF), gated_RF)
            gated_rows, gated_columns = products.store(
                grad_gated_RF, layout, rows=needs_x, columns=needs_gate
            )
            raised_rows, raised_columns = products.store(
                grad_raised_RF, layout, rows=needs_x, columns=needs_up
            )
            if needs_gate:
                grad_gate_LFD = weight_gradient(0, gated_columns, tuple(x_columns))
            if needs_up:
                grad_up_LFD = weight_gradient(1, raised_columns, tuple(x_columns))
            if needs_x:
                grad_x_RD = grad_y_RD.new_empty(grad_y_RD.shape)
                pairs = [(gated_rows, gate.transposed), (raised_rows, up.transposed)]
                products.multiply(pairs, layout, grad_x_RD)
        return grad_x_RD, grad_gate_LFD, grad_up_LFD, grad_down_LDF, None, None, None, None
