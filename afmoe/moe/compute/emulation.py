"""Exact emulation of quantized experts: what kernels for fp8 or mxfp8 would compute, in fp32, on any device.

Products of fp32 operands that are rounded to what the format can hold keep the contract of
`afmoe.moe.quantization`, up to the rounding of fp32 products and sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.compute.grouped import products_like
from afmoe.moe.compute.node import Backward, ExpertMlp, Forward
from afmoe.moe.compute.rounding import CHUNK_ELEMENTS, ColumnBlocks, Rounding, round_columns, round_rows
from afmoe.moe.grouped_mm import ExpertWeights, Segments


@dataclass(frozen=True)
class Emulation(ExpertMlp):
    """What is rounded, and how. A few experts at a time: what lies between their products stays in the cache.

    Saved for backward: gate and up product, with x. Without gradients only the weights of experts that have
    rows are rounded: one rounding costs less than a forward over a batch.
    """

    activation: Activation
    rounding: Rounding
    wgrad_in_bf16: bool
    """Operands of the weight gradients: bf16, or in column blocks of the format."""
    stores_weights = True
    form = "products of x"

    def rows(self, x_RK: Tensor) -> Tensor:
        return round_rows(x_RK, self.rounding.scales, self.rounding.block_size)

    def store(self, weights: ExpertWeights, offsets_L: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Of gate, up and down: the rounded weights of y = x w.T and those of dx = dy w."""
        projections = (weights.gate_LFD, weights.up_LFD, weights.down_LDF)
        if offsets_L is None:
            return [self.rounding.weights(w_LNK, backward=True) for w_LNK in projections]
        segments = Segments.of(offsets_L)
        return [round_busy_experts(w_LNK, segments, self.rounding) for w_LNK in projections]

    def forward(self, given: Forward, stored: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        x_RD, segments = given.x_RD, Segments.of(given.offsets_L)
        gate, up, down = (weight.transpose(1, 2) for weight, _ in stored)
        gated_RF, raised_RF = self.saved_like(given)
        y_RD = _empty_rows(x_RD, segments)
        for rows, experts in _expert_groups(segments, stored[0][0]):
            x, gated, raised = self.rows(x_RD[rows]), gated_RF[rows], raised_RF[rows]
            _multiply(x, gate, experts, out=gated)
            _multiply(x, up, experts, out=raised)
            _multiply(self.rows(self.activation.hidden(gated, raised)), down, experts, out=y_RD[rows])
        return y_RD, [gated_RF, raised_RF]

    def saved_like(self, given: Forward) -> list[Tensor]:
        return products_like(given)

    def backward(self, given: Backward, stored: list[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
        grad_y_RD, (gated_RF, raised_RF) = given.grad_y_RD, given.saved
        segments = Segments.of(given.offsets_L)
        weights = [weight for _, weight in stored]
        gate, up, down = weights
        needs_x, *needs_weights = given.needed[:4]
        grad_x_RD = _empty_rows(grad_y_RD, segments) if needs_x else None
        grad_weights = [
            _empty_gradient(weight, segments) if needed else None
            for weight, needed in zip(weights, needs_weights, strict=True)
        ]
        for rows, experts in _expert_groups(segments, gate):
            x = given.rows.part(rows.start, rows.stop)
            gated, raised, grad_y = gated_RF[rows], raised_RF[rows], grad_y_RD[rows]
            grad_hidden = torch.empty_like(gated)
            _multiply(self.rows(grad_y), down, experts, out=grad_hidden)
            hidden, (grad_gated, grad_raised) = self.activation.hidden_backward(grad_hidden, gated, raised)
            operands = ((grad_gated, x), (grad_raised, x), (grad_y, hidden))
            _weight_gradients(operands, experts, self, out=grad_weights)
            if grad_x_RD is not None:
                grad_x = torch.empty_like(x, dtype=torch.float32)
                _multiply(self.rows(grad_gated), gate, experts, out=grad_x)
                _multiply(self.rows(grad_raised), up, experts, out=grad_x, accumulate=True)
                grad_x_RD[rows] = grad_x
        dtype = given.weights.up_LFD.dtype
        return [grad_x_RD, *(None if grad is None else grad.to(dtype) for grad in grad_weights), *[None] * 3]


def _expert_groups(segments: Segments, w_LFD: Tensor) -> Iterator[tuple[slice, list[tuple[int, int, int]]]]:
    """Runs of experts with about `CHUNK_ELEMENTS` values in their rows.

    Yields the rows of a run, and (expert, first row, row after the last), counted from the run's first row.
    """
    max_rows = CHUNK_ELEMENTS // max(w_LFD.shape[1:])
    run: list[tuple[int, int, int]] = []
    first = 0
    for e, start, end in segments.busy:
        if run and end - first > max_rows:
            yield slice(first, start), run
            run, first = [], start
        run.append((e, start - first, end - first))
    if run:
        yield slice(first, segments.end), run


def _multiply(
    x_RK: Tensor, w_LKN: Tensor, experts: list[tuple[int, int, int]], *, out: Tensor, accumulate: bool = False
) -> None:
    """out = x @ w per expert, or out += x @ w; the product is fp32, whatever `out` is."""
    product = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    for e, start, end in experts:
        product[start:end].addmm_(x_RK[start:end], w_LKN[e], beta=1 if accumulate else 0)
    if product is not out:
        out.copy_(product)


def _weight_gradients(
    operands: Sequence[tuple[Tensor, Tensor]],
    experts: list[tuple[int, int, int]],
    emulation: Emulation,
    *,
    out: list[Tensor | None],
) -> None:
    """out = grad.T @ x per expert, for each pair (grad, x) whose `out` is not None, on rounded operands."""
    if emulation.wgrad_in_bf16:
        slots, round_operand = experts, _round_to_bf16
    else:
        rounding = emulation.rounding
        blocks = ColumnBlocks.of(experts, operands[0][0].device, rounding.block_size)
        slots, round_operand = blocks.slots, partial(round_columns, blocks=blocks, scales=rounding.scales)
    last_x, x_rounded = None, None
    for (grad, x), out_LNK in zip(operands, out, strict=True):
        if out_LNK is None:
            continue
        grad_rounded = round_operand(grad)
        # gate and up have the same x
        if x is not last_x or x_rounded is None:
            last_x, x_rounded = x, round_operand(x)
        for e, start, end in slots:
            torch.mm(grad_rounded[start:end].t(), x_rounded[start:end], out=out_LNK[e])


def _round_to_bf16(rows_RK: Tensor) -> Tensor:
    return rows_RK.bfloat16().float()


def _empty_rows(like_RD: Tensor, segments: Segments) -> Tensor:
    """Rows to be filled; those past the last expert are exactly zero."""
    rows_RD = torch.empty_like(like_RD, memory_format=torch.contiguous_format)
    rows_RD[segments.end :].zero_()
    return rows_RD


def _empty_gradient(weight_LNK: Tensor, segments: Segments) -> Tensor:
    """A weight gradient to be filled; experts without rows are exactly zero."""
    grad_LNK = torch.empty_like(weight_LNK)
    for e in segments.idle:
        grad_LNK[e].zero_()
    return grad_LNK


def round_busy_experts(w_LNK: Tensor, segments: Segments, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The rounded weights of the experts that have rows, for forward; those of the others are undefined."""
    busy = [e for e, _, _ in segments.busy]
    if len(busy) == w_LNK.shape[0]:
        return rounding.weights(w_LNK, backward=False)
    rounded_LNK = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
    rounded_LNK[busy], _ = rounding.weights(w_LNK[busy], backward=False)
    return rounded_LNK, rounded_LNK
