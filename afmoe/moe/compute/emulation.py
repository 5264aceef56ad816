"""Exact emulation of quantized experts: what kernels for fp8 or mxfp8 would compute, in fp32, on any device.

Products of fp32 operands that are rounded to what the format can hold keep the contract of
`afmoe.moe.quantization`, up to the rounding of fp32 products and sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.moe.activations import Activation
from afmoe.moe.compute.rounding import CHUNK_ELEMENTS, ColumnBlocks, Rounding, round_columns, round_rows
from afmoe.moe.compute.weight_copies import WeightCopies
from afmoe.moe.grouped_mm import RowSource, Segments
from afmoe.moe.grouped_mm.saved_rows import SavedRows


@dataclass(frozen=True)
class Emulation:
    """What is rounded, and how."""

    activation: Activation
    rounding: Rounding
    wgrad_in_bf16: bool
    """Operands of the weight gradients: bf16, or in column blocks of the format."""

    def rows(self, x_RK: Tensor) -> Tensor:
        return round_rows(x_RK, self.rounding.scales, self.rounding.block_size)


# host offsets, and weights known by address and version: a graph has neither
@torch.compiler.disable
def emulated_gated_mlp(
    x_RD: Tensor,
    offsets_L: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    rounded_weights: RoundedWeights,
    emulation: Emulation,
    source: RowSource | None,
) -> Tensor:
    """The gated MLP of `afmoe.moe.compute` with every operand of every product rounded.

    Gate and up product, hidden rows and y have the dtype of x; gradients that of what they belong to.
    """
    segments = Segments.of(offsets_L)
    if torch.is_grad_enabled():
        rounded = rounded_weights.get(weights, emulation.rounding)
    else:
        rounded = [round_busy_experts(weight, segments, emulation.rounding) for weight in weights]
    return _EmulatedMlp.apply(x_RD, *weights, *(source or (None, None)), rounded, segments, emulation)


class _EmulatedMlp(torch.autograd.Function):
    """A few experts at a time: what lies between their products stays in the cache."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_LFD: Tensor,
        up_LFD: Tensor,
        down_LDF: Tensor,
        tokens_TD: Tensor | None,
        token_of_row_R: Tensor | None,
        rounded: list[tuple[Tensor, Tensor]],
        segments: Segments,
        emulation: Emulation,
    ) -> Tensor:
        activation = emulation.activation
        gate, up, down = (weight.transpose(1, 2) for weight, _ in rounded)
        gated_RF = x_RD.new_empty(segments.end, gate_LFD.shape[1])
        raised_RF = torch.empty_like(gated_RF)
        y_RD = _empty_rows(x_RD, segments)
        with torch.autocast(x_RD.device.type, enabled=False):
            for rows, experts in _expert_groups(segments, gate_LFD):
                x, gated, raised = emulation.rows(x_RD[rows]), gated_RF[rows], raised_RF[rows]
                _multiply(x, gate, experts, out=gated)
                _multiply(x, up, experts, out=raised)
                _multiply(emulation.rows(activation.hidden(gated, raised)), down, experts, out=y_RD[rows])
        kept_x_RD = x_RD if tokens_TD is None else None
        ctx.save_for_backward(kept_x_RD, tokens_TD, token_of_row_R, gated_RF, raised_RF)
        ctx.weights = [weight for _, weight in rounded]
        ctx.segments, ctx.emulation = segments, emulation
        ctx.weights_dtype = gate_LFD.dtype
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *kept, gated_RF, raised_RF = ctx.saved_tensors
        saved_x = SavedRows(*kept, dtype=raised_RF.dtype)
        gate, up, down = ctx.weights
        emulation: Emulation = ctx.emulation
        activation = emulation.activation
        needs_x, *needs_weights = ctx.needs_input_grad[:4]
        grad_x_RD = _empty_rows(grad_y_RD, ctx.segments) if needs_x else None
        grad_weights = [
            _empty_gradient(weight, ctx.segments) if needed else None
            for weight, needed in zip(ctx.weights, needs_weights, strict=True)
        ]
        with torch.autocast(grad_y_RD.device.type, enabled=False):
            for rows, experts in _expert_groups(ctx.segments, gate):
                x = saved_x.part(rows.start, rows.stop)
                gated, raised, grad_y = gated_RF[rows], raised_RF[rows], grad_y_RD[rows]
                grad_hidden = torch.empty_like(gated)
                _multiply(emulation.rows(grad_y), down, experts, out=grad_hidden)
                hidden, (grad_gated, grad_raised) = activation.hidden_backward(grad_hidden, gated, raised)
                operands = ((grad_gated, x), (grad_raised, x), (grad_y, hidden))
                _weight_gradients(operands, experts, emulation, out=grad_weights)
                if grad_x_RD is not None:
                    grad_x = torch.empty_like(x, dtype=torch.float32)
                    _multiply(emulation.rows(grad_gated), gate, experts, out=grad_x)
                    _multiply(emulation.rows(grad_raised), up, experts, out=grad_x, accumulate=True)
                    grad_x_RD[rows] = grad_x
        grads = (grad if grad is None else grad.to(ctx.weights_dtype) for grad in grad_weights)
        return grad_x_RD, *grads, None, None, None, None, None


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


class RoundedWeights(WeightCopies):
    """The rounded copies of an expert layer's weights in training.

    Without gradients only experts that have rows are rounded: one rounding costs less than a forward over a
    batch.
    """

    def get(self, weights: tuple[Tensor, ...], rounding: Rounding) -> list[tuple[Tensor, Tensor]]:
        return self.of(
            weights, lambda weights: [rounding.weights(w.detach(), backward=True) for w in weights]
        )
