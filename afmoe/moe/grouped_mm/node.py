"""The experts' MLP as one node of autograd, and as one operator of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.errors import ConfigError
from afmoe.moe.activations import Activation, activation_named
from afmoe.moe.grouped_mm.grouped import backward_by_grouped_mm, forward_by_grouped_mm
from afmoe.moe.grouped_mm.saved_rows import RowSource, SavedRows
from afmoe.moe.grouped_mm.segments import backward_by_segments, forward_by_segments
from afmoe.moe.grouped_mm.weights import ExpertWeights

NUM_DIFFERENTIABLE = 1 + len(ExpertWeights._fields)
# offsets, the source's two tensors, activation, way
_NO_GRADIENTS = (None,) * 5


def expert_mlp_node(
    x_RD: Tensor,
    weights: ExpertWeights,
    offsets_L: Tensor,
    activation: Activation,
    source: RowSource | None,
    *,
    by_grouped_mm: bool,
) -> Tensor:
    """y, differentiable in x and the weights. All operands but the source have the dtype of the products."""
    tokens_TD, token_of_row_R = (None, None) if source is None else source
    inputs = (x_RD, *weights, offsets_L, tokens_TD, token_of_row_R)
    if not torch.compiler.is_compiling():
        return _ExpertMlp.apply(*inputs, activation, by_grouped_mm)
    if not activation.has_derivative:
        raise ConfigError(
            f"hidden_act={activation.name} cannot be compiled, because its derivative is taken by autograd "
            "inside an operator; run without torch.compile"
        )
    return _expert_mlp(*inputs, activation.name, by_grouped_mm)[0]


def _forward(
    x_RD: Tensor, weights: ExpertWeights, offsets_L: Tensor, activation: Activation, by_grouped_mm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y and, for backward, the products before the activation: gate's (empty without a gate) and up's."""
    forward = forward_by_grouped_mm if by_grouped_mm else forward_by_segments
    # the operands have their dtype already
    with torch.autocast(x_RD.device.type, enabled=False):
        y_RD, products_RF = forward(x_RD, weights, offsets_L, activation)
    gated_RF = x_RD.new_empty(0) if weights.gate_LFD is None else products_RF[0]
    return y_RD, gated_RF, products_RF[-1]


def _backward(
    grad_y_RD: Tensor,
    saved: Sequence[Any],
    activation: Activation,
    by_grouped_mm: bool,
    needed: list[bool],
) -> list[Tensor | None]:
    """Gradients of x and the weights, where `needed`. `saved` as `_save` has it."""
    x_RD, tokens_TD, token_of_row_R, gated_RF, raised_RF, offsets_L, *others = saved
    rows = SavedRows(x_RD, tokens_TD, token_of_row_R, raised_RF.dtype)
    weights = ExpertWeights(*others)
    products_RF = [raised_RF] if weights.gate_LFD is None else [gated_RF, raised_RF]
    backward = backward_by_grouped_mm if by_grouped_mm else backward_by_segments
    with torch.autocast(grad_y_RD.device.type, enabled=False):
        return backward(grad_y_RD, rows, products_RF, weights, offsets_L, activation, needed)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_RD, *weights, offsets_L, tokens_TD, token_of_row_R, ctx.activation, ctx.by_grouped_mm = inputs
    _, gated_RF, raised_RF = output
    kept_x_RD = x_RD if tokens_TD is None else None
    ctx.save_for_backward(kept_x_RD, tokens_TD, token_of_row_R, gated_RF, raised_RF, offsets_L, *weights)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x_RD, *weights, offsets_L, _, _, activation, by_grouped_mm = inputs
        output = _forward(x_RD, ExpertWeights(*weights), offsets_L, activation, by_grouped_mm)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = list(ctx.needs_input_grad[:NUM_DIFFERENTIABLE])
        grads = _backward(grad_y_RD, ctx.saved_tensors, ctx.activation, ctx.by_grouped_mm, needed)
        return *grads, *_NO_GRADIENTS


@torch.library.custom_op("afmoe::expert_mlp", mutates_args=())
def _expert_mlp(
    x_RD: Tensor,
    gate_LFD: Tensor | None,
    up_LFD: Tensor,
    down_LDF: Tensor,
    gate_bias_LF: Tensor | None,
    up_bias_LF: Tensor | None,
    down_bias_LD: Tensor | None,
    offsets_L: Tensor,
    tokens_TD: Tensor | None,
    token_of_row_R: Tensor | None,
    activation: str,
    by_grouped_mm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = ExpertWeights(gate_LFD, up_LFD, down_LDF, gate_bias_LF, up_bias_LF, down_bias_LD)
    return _forward(x_RD, weights, offsets_L, activation_named(activation), by_grouped_mm)


@_expert_mlp.register_fake
def _(x_RD: Tensor, gate_LFD: Tensor | None, up_LFD: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    raised_RF = x_RD.new_empty(x_RD.shape[0], up_LFD.shape[1])
    gated_RF = x_RD.new_empty(0) if gate_LFD is None else torch.empty_like(raised_RF)
    return x_RD.new_empty(x_RD.shape), gated_RF, raised_RF


@torch.library.custom_op("afmoe::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    grad_y_RD: Tensor,
    saved: Sequence[Tensor | None],
    activation: str,
    by_grouped_mm: bool,
    needed: list[bool],
) -> list[Tensor]:
    """Those gradients that are needed, in `_backward`'s order."""
    grads = _backward(grad_y_RD, saved, activation_named(activation), by_grouped_mm, needed)
    return [grad for grad in grads if grad is not None]


@_expert_mlp_backward.register_fake
def _(
    grad_y_RD: Tensor,
    saved: Sequence[Tensor | None],
    activation: str,
    by_grouped_mm: bool,
    needed: list[bool],
):
    _, _, _, _, raised_RF, _, *weights = saved
    assert raised_RF is not None
    grads = [
        tensor.new_empty(tensor.shape)
        for tensor, is_needed in zip(weights, needed[1:], strict=True)
        if is_needed and tensor is not None
    ]
    return [raised_RF.new_empty(grad_y_RD.shape), *grads] if needed[0] else grads


def _save_in_graph(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)
    # the two products go nowhere else; zeros for their gradients would be two tensors of their size
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_y_RD: Tensor, *_: None) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:NUM_DIFFERENTIABLE])
    grads = iter(
        _expert_mlp_backward(grad_y_RD, list(ctx.saved_tensors), ctx.activation, ctx.by_grouped_mm, needed)
    )
    return *(next(grads) if is_needed else None for is_needed in needed), *_NO_GRADIENTS


_expert_mlp.register_autograd(_differentiate, setup_context=_save_in_graph)
