"""The experts one after the other, each by `torch.mm` on its rows: any dtype, any size, host offsets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.grouped_mm.saved_rows import SavedRows
from afmoe.moe.grouped_mm.weights import ExpertWeights


@dataclass(frozen=True)
class Segments:
    """Each expert's rows as host integers. On a CUDA device making this waits for the GPU."""

    busy: list[tuple[int, int, int]]
    """(expert, first row, row after the last) of each expert that has rows."""
    idle: list[int]
    """The experts without rows."""
    end: int
    """Row at which the last expert ends and the padding begins."""

    @classmethod
    def of(cls, offsets_L: Tensor) -> Segments:
        borders = [0, *offsets_L.tolist()]
        segments = [(e, start, end) for e, (start, end) in enumerate(itertools.pairwise(borders))]
        return cls(
            busy=[segment for segment in segments if segment[1] < segment[2]],
            idle=[e for e, start, end in segments if start == end],
            end=borders[-1],
        )


def forward_by_segments(
    x_RD: Tensor, weights: ExpertWeights, offsets_L: Tensor, activation: Activation
) -> tuple[Tensor, list[Tensor]]:
    """y, and the products before the activation [R, F]: gate and up, or up alone."""
    segments = Segments.of(offsets_L)
    x_RD = x_RD.contiguous()
    products_RF = [x_RD.new_empty(x_RD.shape[0], weights.up_LFD.shape[1]) for _ in weights.first]
    y_RD = torch.empty_like(x_RD)
    for e, start, end in segments.busy:
        products = [product_RF[start:end] for product_RF in products_RF]
        for product, (weight_LFD, bias_LF) in zip(products, weights.first, strict=True):
            _multiply(x_RD[start:end], weight_LFD, bias_LF, e, out=product)
        hidden = activation.hidden(*products)
        _multiply(hidden, weights.down_LDF, weights.down_bias_LD, e, out=y_RD[start:end])
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
) -> list[Tensor | None]:
    """Gradients of x and the six weights, where `needed`."""
    segments = Segments.of(offsets_L)
    grad_y_RD = grad_y_RD.contiguous()
    grad_x_RD, *grad_weights = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and is_needed
        else None
        for tensor, is_needed in zip((grad_y_RD, *weights), needed, strict=True)
    )
    grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias = grad_weights
    first_grads = [(grad_gate, grad_gate_bias), (grad_up, grad_up_bias)][-len(products_RF) :]
    for e, start, end in segments.busy:
        grad_y = grad_y_RD[start:end]
        grad_hidden = torch.mm(grad_y, weights.down_LDF[e])
        products = [product_RF[start:end] for product_RF in products_RF]
        hidden, grad_products = activation.hidden_backward(grad_hidden, *products)
        _write_gradients(e, grad_y, hidden, grad_down, grad_down_bias)
        x_rows = x.part(start, end)
        for grad, (grad_weight, grad_bias) in zip(grad_products, first_grads, strict=True):
            _write_gradients(e, grad, x_rows, grad_weight, grad_bias)
        if grad_x_RD is not None:
            grad_x = grad_x_RD[start:end]
            for number, (grad, (weight, _)) in enumerate(zip(grad_products, weights.first, strict=True)):
                grad_x.addmm_(grad, weight[e], beta=min(number, 1))
    if grad_x_RD is not None:
        grad_x_RD[segments.end :].zero_()
    for grad, e in itertools.product(grad_weights, segments.idle):
        if grad is not None:
            grad[e].zero_()
    return [grad_x_RD, *grad_weights]


def _multiply(x: Tensor, weight_LNK: Tensor, bias_LN: Tensor | None, e: int, *, out: Tensor) -> None:
    if bias_LN is None:
        torch.mm(x, weight_LNK[e].t(), out=out)
    else:
        torch.addmm(bias_LN[e], x, weight_LNK[e].t(), out=out)


def _write_gradients(
    e: int, grad: Tensor, x: Tensor, grad_weight_LNK: Tensor | None, grad_bias_LN: Tensor | None
) -> None:
    if grad_weight_LNK is not None:
        torch.mm(grad.t(), x, out=grad_weight_LNK[e])
    if grad_bias_LN is not None:
        torch.sum(grad, 0, out=grad_bias_LN[e])
