"""The MLP of many experts on the kernels: one autograd node, forward and backward, in any format.

Saved for backward: the products before the activation, and of x the copy for the weight gradients, or where
it was gathered from if that copy would be the rows themselves; the hidden rows are computed again. In bf16
models that is 4 x intermediate_size bytes a row, and hidden_size more in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.moe.activations import Activation
from afmoe.moe.compute.kernels.layout import TileLayout
from afmoe.moe.compute.kernels.products import Products, Stored, Weight
from afmoe.moe.compute.weight_copies import WeightCopies
from afmoe.moe.grouped_mm import RowSource


class KernelExperts:
    """The experts of one layer on the kernels of one format; weights are stored once an optimizer step."""

    def __init__(self, products: Products, activation: Activation) -> None:
        self.products = products
        self.activation = activation
        self.weight_copies = WeightCopies()

    def __call__(
        self,
        x_RD: Tensor,
        offsets_L: Tensor,
        gate_LFD: Tensor | None,
        up_LFD: Tensor,
        down_LDF: Tensor,
        source: RowSource | None = None,
    ) -> Tensor:
        """activation.hidden(x @ gate.T, x @ up.T) @ down.T per expert. Contract: `afmoe.moe.compute`.

        The products before the activation, hidden rows and y have the dtype of x; gradients that of what they
        belong to.
        """
        # the decorator is typed as if it returned one
        weights = (gate_LFD, up_LFD, down_LDF)
        return _multiply(self, x_RD, offsets_L, weights, source)  # pyright: ignore[reportCallIssue]

    def on_weights_updated(self) -> None:
        self.weight_copies.drop()

    def store_for_training(self, weights: tuple[Tensor, ...]) -> list[Weight]:
        return self.store(weights, transposed=True)

    def store(self, weights: tuple[Tensor, ...], *, transposed: bool) -> list[Weight]:
        return [self.products.store_weight(weight.detach(), transposed=transposed) for weight in weights]


# weights are known by address and version, which a compiled graph does not have
@torch.compiler.disable
def _multiply(
    experts: KernelExperts,
    x_RD: Tensor,
    offsets_L: Tensor,
    gate_up_down: tuple[Tensor | None, Tensor, Tensor],
    source: RowSource | None,
) -> Tensor:
    weights = tuple(weight for weight in gate_up_down if weight is not None)
    if torch.is_grad_enabled():
        stored = experts.weight_copies.of(weights, experts.store_for_training)
    else:
        stored = experts.store(weights, transposed=False)
    if not experts.products.columns_are_rows:
        source = None
    return _ExpertMlp.apply(offsets_L, experts.activation, experts.products, stored, source, x_RD, *weights)


class _ExpertMlp(torch.autograd.Function):
    """`weights` are gate (where there is one), up and down; `stored` is the same in the products' format."""

    @staticmethod
    def forward(
        ctx: Any,
        offsets_L: Tensor,
        activation: Activation,
        products: Products,
        stored: list[Weight],
        source: RowSource | None,
        x_RD: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        *first, down = stored
        layout = TileLayout.of(offsets_L, x_RD.shape[0])
        needs_first = any(ctx.needs_input_grad[6:-1])
        x_rows, x_columns = products.store(x_RD, layout, rows=True, columns=needs_first and source is None)
        results_RF = [
            products.multiply([(x_rows, weight.forward)], layout, _new_rows(x_RD, like.shape[1]))
            for weight, like in zip(first, weights, strict=False)
        ]
        hidden_rows, _ = products.store(activation.hidden(*results_RF), layout, rows=True, columns=False)
        y_RD = products.multiply([(hidden_rows, down.forward)], layout, _new_rows(x_RD, x_RD.shape[1]))
        kept_of_x = source if needs_first and source is not None else x_columns
        ctx.save_for_backward(*results_RF, *kept_of_x)
        ctx.layout, ctx.activation, ctx.products, ctx.stored = layout, activation, products, stored
        ctx.has_source = source is not None
        ctx.like = [(weight.shape, weight.dtype) for weight in weights]
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *first, down = ctx.stored
        results_RF, kept_of_x = ctx.saved_tensors[: len(first)], ctx.saved_tensors[len(first) :]
        layout: TileLayout = ctx.layout
        activation: Activation = ctx.activation
        products: Products = ctx.products
        needs_x, *needs_first, needs_down = ctx.needs_input_grad[5:]
        needs_hidden = needs_x or any(needs_first)

        def weight_gradients(
            grads_columns: Sequence[Stored], columns: Stored, like: Sequence[Any]
        ) -> list[Tensor | None]:
            return [
                products.weight_gradient(grad, columns, layout, grad_y_RD.new_empty(shape, dtype=dtype))
                if grad
                else None
                for grad, (shape, dtype) in zip(grads_columns, like, strict=True)
            ]

        grad_y_rows, grad_y_columns = products.store(grad_y_RD, layout, rows=needs_hidden, columns=needs_down)
        grad_x_RD, grad_first = None, [None] * len(first)
        if needs_hidden:
            grad_hidden_RF = torch.empty_like(results_RF[0])
            products.multiply([(grad_y_rows, down.transposed)], layout, grad_hidden_RF)
            hidden_RF, grads_RF = activation.hidden_backward(grad_hidden_RF, *results_RF)
            copies = [
                products.store(grad, layout, rows=needs_x, columns=needed)
                for grad, needed in zip(grads_RF, needs_first, strict=True)
            ]
            x_columns = kept_of_x
            if ctx.has_source and any(needs_first):
                x_RD = RowSource(*kept_of_x).rows().to(grad_y_RD.dtype)
                _, x_columns = products.store(x_RD, layout, rows=False, columns=True)
            grad_first = weight_gradients([columns for _, columns in copies], x_columns, ctx.like[:-1])
            if needs_x:
                pairs = [(rows, weight.transposed) for (rows, _), weight in zip(copies, first, strict=True)]
                grad_x_RD = products.multiply(pairs, layout, _new_rows(grad_y_RD, grad_y_RD.shape[1]))
        else:
            hidden_RF = activation.hidden(*results_RF)
        _, hidden_columns = products.store(hidden_RF, layout, rows=False, columns=needs_down)
        grad_down = weight_gradients([grad_y_columns], hidden_columns, ctx.like[-1:])
        return None, None, None, None, None, grad_x_RD, *grad_first, *grad_down


def _new_rows(like_RD: Tensor, size: int) -> Tensor:
    return like_RD.new_empty(like_RD.shape[0], size)
