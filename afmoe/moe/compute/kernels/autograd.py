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


def gated_mlp_by_kernels(
    x_RD: Tensor,
    offsets_L: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    activation: Activation,
    products: Products,
    stored_weights: tuple[Weight, Weight, Weight] | None = None,
) -> Tensor:
    """(activation(x @ gate.T) * (x @ up.T)) @ down.T per expert. Contract: `afmoe.moe.compute`.

    Gate and up product, hidden rows and y have the dtype of x; gradients that of what they belong to.
    `stored_weights`: what `store_weights` made of the three weights; None makes them here.
    """
    weights = (gate_LFD, up_LFD, down_LDF)
    if stored_weights is None:
        stored_weights = store_weights(weights, products)
    return _GatedMlp.apply(x_RD, *weights, offsets_L, activation, products, stored_weights)


def store_weights(
    weights: tuple[Tensor, Tensor, Tensor], products: Products
) -> tuple[Weight, Weight, Weight]:
    """The weights in the products' format; the copy for backward only while gradients are recorded."""
    transposed = torch.is_grad_enabled()
    with torch.no_grad():
        gate, up, down = (products.store_weight(weight, transposed=transposed) for weight in weights)
    return gate, up, down


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
        weights: tuple[Weight, Weight, Weight],
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
