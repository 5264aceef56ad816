"""A run of experts after the other, with host offsets: any dtype, any size."""

from __future__ import annotations

import torch
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.grouped_mm.products import RunProducts
from afmoe.moe.grouped_mm.saved_rows import SavedRows
from afmoe.moe.grouped_mm.segments import ExpertRun, Segments
from afmoe.moe.grouped_mm.weights import ExpertWeights


def forward_by_segments(
    x_RD: Tensor, weights: ExpertWeights, offsets_L: Tensor, activation: Activation, products: RunProducts
) -> tuple[Tensor, list[Tensor]]:
    """y, and the products before the activation [R, F]: gate and up, or up alone."""
    segments = Segments.of(offsets_L, num_experts=weights.num_experts, num_rows=x_RD.shape[0])
    x_RD = x_RD.contiguous()
    products_RF = [x_RD.new_empty(x_RD.shape[0], weights.up_LFD.shape[1]) for _ in weights.first]
    y_RD = torch.empty_like(x_RD)
    for run in segments.runs(products.chunk_elements // max(weights.up_LFD.shape[1:])):
        parts = [product_RF[run.rows] for product_RF in products_RF]
        for part, (weight_LFD, bias_LF) in zip(parts, weights.first, strict=True):
            products.multiply(x_RD[run.rows], weight_LFD.transpose(1, 2), run, out_RN=part)
            _add_bias(part, bias_LF, run)
        hidden, y = activation.hidden(*parts), y_RD[run.rows]
        products.multiply(hidden, weights.down_LDF.transpose(1, 2), run, out_RN=y)
        _add_bias(y, weights.down_bias_LD, run)
    y_RD[segments.end :].zero_()
    return y_RD, products_RF


def backward_by_segments(
    grad_y_RD: Tensor,
    x: SavedRows,
    products_RF: list[Tensor],
    weights: ExpertWeights,
    offsets_L: Tensor,
    activation: Activation,
    needed: list[bool],
    products: RunProducts,
) -> list[Tensor | None]:
    """Gradients of x and the six weights, where `needed`."""
    segments = Segments.of(offsets_L, num_experts=weights.num_experts, num_rows=grad_y_RD.shape[0])
    grad_y_RD = grad_y_RD.contiguous()
    grad_x_RD, *grad_weights = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and is_needed
        else None
        for tensor, is_needed in zip((grad_y_RD, *weights), needed, strict=True)
    )
    grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias = grad_weights
    first_grads = [(grad_gate, grad_gate_bias), (grad_up, grad_up_bias)][-len(products_RF) :]
    for run in segments.runs(products.chunk_elements // max(weights.up_LFD.shape[1:])):
        grad_y = grad_y_RD[run.rows]
        parts = [product_RF[run.rows] for product_RF in products_RF]
        grad_hidden = torch.empty_like(parts[0])
        products.multiply(grad_y, weights.down_LDF, run, out_RN=grad_hidden)
        hidden, grad_parts = activation.hidden_backward(grad_hidden, *parts)
        if grad_down is not None:
            products.weight_gradient(grad_y, hidden, run, out_LNK=grad_down)
        _write_bias_gradient(grad_y, run, grad_down_bias)
        if grad_gate is not None or grad_up is not None:
            x_rows = x.part(run.rows.start, run.rows.stop)
            for grad, (grad_weight, _) in zip(grad_parts, first_grads, strict=True):
                if grad_weight is not None:
                    products.weight_gradient(grad, x_rows, run, out_LNK=grad_weight)
        for grad, (_, grad_bias) in zip(grad_parts, first_grads, strict=True):
            _write_bias_gradient(grad, run, grad_bias)
        if grad_x_RD is not None:
            for number, (grad, (weight_LFD, _)) in enumerate(zip(grad_parts, weights.first, strict=True)):
                products.multiply(grad, weight_LFD, run, out_RN=grad_x_RD[run.rows], accumulate=number > 0)
    if grad_x_RD is not None:
        grad_x_RD[segments.end :].zero_()
    return [grad_x_RD, *grad_weights]


def _add_bias(rows_RN: Tensor, bias_LN: Tensor | None, run: ExpertRun) -> None:
    if bias_LN is not None:
        for e, start, end in run.busy:
            rows_RN[start:end] += bias_LN[e]


def _write_bias_gradient(grad_RN: Tensor, run: ExpertRun, grad_bias_LN: Tensor | None) -> None:
    if grad_bias_LN is not None:
        for e, start, end in run.experts:
            torch.sum(grad_RN[start:end], 0, out=grad_bias_LN[e])
