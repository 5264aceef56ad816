"""Exact emulation of quantized experts: what kernels for fp8 or mxfp8 would compute, in fp32, on any device.

Products of fp32 operands that are rounded to what the format can hold keep the contract of
`afmoe.moe.quantization`, up to the rounding of fp32 products and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.compute.grouped import products_like
from afmoe.moe.compute.node import Backward, ExpertMlp, Forward
from afmoe.moe.compute.rounding import Rounding
from afmoe.moe.grouped_mm import ExpertRun, ExpertWeights, RunProducts, Segments


@dataclass(frozen=True)
class Emulation(ExpertMlp):
    """What is rounded, and how. A few experts at a time: what lies between their products stays in the cache.

    Saved for backward: gate and up product, with x. Without gradients only the weights of experts that have
    rows are rounded: one rounding costs less than a forward over a batch.
    """

    activation: Activation
    rounding: Rounding
    products: RunProducts
    wgrad_in_bf16: bool
    """Operands of the weight gradients: bf16, or in column blocks of the format."""
    stores_weights = True
    form = "products of x"

    def store(self, weights: ExpertWeights, offsets_L: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Of gate, up and down: the rounded weights of y = x w.T and those of dx = dy w."""
        assert weights.gate_LFD is not None
        projections = (weights.gate_LFD, weights.up_LFD, weights.down_LDF)
        if offsets_L is None:
            return [self.rounding.weights(w_LNK, backward=True) for w_LNK in projections]
        segments = Segments.of(offsets_L, num_experts=weights.num_experts, num_rows=int(offsets_L[-1]))
        return [self._store_busy(w_LNK, segments) for w_LNK in projections]

    def forward(self, given: Forward, stored: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        x_RD, segments = given.x_RD, _segments(given.offsets_L, given.weights, given.x_RD)
        gate, up, down = (weight.transpose(1, 2) for weight, _ in stored)
        gated_RF, raised_RF = self.saved_like(given)
        y_RD = _empty_rows(x_RD, segments)
        for run in self._runs(segments, given.weights):
            x, gated, raised = self.rounding.rows(x_RD[run.rows]), gated_RF[run.rows], raised_RF[run.rows]
            self._multiply(x, gate, run, out=gated)
            self._multiply(x, up, run, out=raised)
            hidden = self.rounding.rows(self.activation.hidden(gated, raised))
            self._multiply(hidden, down, run, out=y_RD[run.rows])
        return y_RD, [gated_RF, raised_RF]

    def saved_like(self, given: Forward) -> list[Tensor]:
        return products_like(given)

    def backward(self, given: Backward, stored: list[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
        grad_y_RD, (gated_RF, raised_RF) = given.grad_y_RD.contiguous(), given.saved
        segments = _segments(given.offsets_L, given.weights, grad_y_RD)
        gate, up, down = (weight for _, weight in stored)
        needs_x, *needs_weights = given.needed[:4]
        grad_x_RD = _empty_rows(grad_y_RD, segments) if needs_x else None
        grad_weights = [
            torch.empty_like(weight) if needed else None
            for (_, weight), needed in zip(stored, needs_weights, strict=True)
        ]
        for run in self._runs(segments, given.weights):
            gated, raised, grad_y = gated_RF[run.rows], raised_RF[run.rows], grad_y_RD[run.rows]
            grad_hidden = torch.empty_like(gated)
            self._multiply(self.rounding.rows(grad_y), down, run, out=grad_hidden)
            hidden, (grad_gated, grad_raised) = self.activation.hidden_backward(grad_hidden, gated, raised)
            x = given.rows.part(run.rows.start, run.rows.stop) if any(needs_weights[:2]) else None
            operands = ((grad_gated, x), (grad_raised, x), (grad_y, hidden))
            self._weight_gradients(operands, run, out=grad_weights)
            if grad_x_RD is not None:
                grad_x = torch.empty_like(grad_y, dtype=torch.float32)
                self.products.multiply(self.rounding.rows(grad_gated), gate, run, out_RN=grad_x)
                raised_rows = self.rounding.rows(grad_raised)
                self.products.multiply(raised_rows, up, run, out_RN=grad_x, accumulate=True)
                grad_x_RD[run.rows] = grad_x
        dtype = given.weights.up_LFD.dtype
        return [grad_x_RD, *(None if grad is None else grad.to(dtype) for grad in grad_weights), *[None] * 3]

    def _runs(self, segments: Segments, weights: ExpertWeights) -> Sequence[ExpertRun]:
        return [*segments.runs(self.products.chunk_elements // max(weights.up_LFD.shape[1:]))]

    def _multiply(self, x_RK: Tensor, w_LKN: Tensor, run: ExpertRun, *, out: Tensor) -> None:
        """out = x @ w per expert; the product is fp32, whatever `out` is."""
        product = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self.products.multiply(x_RK, w_LKN, run, out_RN=product)
        if product is not out:
            out.copy_(product)

    def _weight_gradients(
        self, operands: Sequence[tuple[Tensor, Tensor | None]], run: ExpertRun, *, out: list[Tensor | None]
    ) -> None:
        """out = grad.T @ x per expert on rounded operands, for each pair (grad, x) that has an `out`."""
        last_x, x_rounded = None, None
        for (grad, x), out_LNK in zip(operands, out, strict=True):
            if out_LNK is None or x is None:
                continue
            grad_rounded, slots = self._round_columns(grad, run)
            # gate and up have the same x
            if x is not last_x or x_rounded is None:
                last_x, (x_rounded, _) = x, self._round_columns(x, run)
            self.products.weight_gradient(grad_rounded, x_rounded, slots, out_LNK=out_LNK)

    def _round_columns(self, rows_RK: Tensor, run: ExpertRun) -> tuple[Tensor, ExpertRun]:
        if self.wgrad_in_bf16:
            return rows_RK.bfloat16().float(), run
        return self.rounding.columns(rows_RK, run)

    def _store_busy(self, w_LNK: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """The rounded weights of the experts that have rows, for forward; of the others undefined."""
        busy = [e for e, start, end in segments.experts if start < end]
        if len(busy) == w_LNK.shape[0]:
            return self.rounding.weights(w_LNK, backward=False)
        rounded_LNK = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
        rounded_LNK[busy], _ = self.rounding.weights(w_LNK[busy], backward=False)
        return rounded_LNK, rounded_LNK


def _segments(offsets_L: Tensor, weights: ExpertWeights, rows_RD: Tensor) -> Segments:
    return Segments.of(offsets_L, num_experts=weights.num_experts, num_rows=rows_RD.shape[0])


def _empty_rows(like_RD: Tensor, segments: Segments) -> Tensor:
    """Rows to be filled; those past the last expert are exactly zero."""
    rows_RD = torch.empty_like(like_RD, memory_format=torch.contiguous_format)
    rows_RD[segments.end :].zero_()
    return rows_RD
