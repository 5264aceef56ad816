"""Exact emulation of the fp8 experts: what fp8 kernels would compute, in fp32, on any device.

Products of fp32 operands that are rounded to what fp8 can hold keep the contract of `afmoe.moe.quantization`,
up to the rounding of fp32 products and sums.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.moe.activations import Activation
from afmoe.moe.compute.rounding import ColumnBlocks, round_columns, round_rows, round_weights
from afmoe.moe.grouped_mm import Segments


@dataclass(frozen=True)
class Emulation:
    """What is rounded, and how."""

    activation: Activation
    scales: str
    """`fp32` or `ue8m0`."""
    wgrad: str
    """Operands of the weight gradients: `fp8` in column blocks, or `bf16`."""


def emulated_gated_mlp(
    x_RD: Tensor,
    offsets_L: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    rounded_weights: RoundedWeights,
    emulation: Emulation,
) -> Tensor:
    """The gated MLP of `afmoe.moe.compute` with every operand of every product rounded.

    Gate and up product, hidden rows and y have the dtype of x; gradients that of what they belong to.
    """
    segments = Segments.of(offsets_L)
    if torch.is_grad_enabled():
        rounded = rounded_weights.get(weights, emulation.scales)
    else:
        rounded = [round_busy_experts(weight, segments, emulation.scales) for weight in weights]
    return _EmulatedMlp.apply(x_RD, *weights, rounded, segments, emulation)


class _EmulatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_LFD: Tensor,
        up_LFD: Tensor,
        down_LDF: Tensor,
        rounded: list[Tensor],
        segments: Segments,
        emulation: Emulation,
    ) -> Tensor:
        with torch.autocast(x_RD.device.type, enabled=False):
            x_RD_rounded = round_rows(x_RD[: segments.end], emulation.scales)
            gated_RF = _products(x_RD_rounded, rounded[0], segments).to(x_RD.dtype)
            raised_RF = _products(x_RD_rounded, rounded[1], segments).to(x_RD.dtype)
            hidden_RF = emulation.activation(gated_RF) * raised_RF
            y_RD = _products(round_rows(hidden_RF, emulation.scales), rounded[2], segments)
        ctx.save_for_backward(x_RD, gated_RF, raised_RF)
        ctx.rounded, ctx.segments, ctx.emulation = rounded, segments, emulation
        ctx.weights_dtype = gate_LFD.dtype
        return _with_padding_rows(y_RD, x_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RD, gated_RF, raised_RF = ctx.saved_tensors
        gate_LFD, up_LFD, down_LDF = ctx.rounded
        segments: Segments = ctx.segments
        emulation: Emulation = ctx.emulation
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        grad_x_RD = grad_gate_LFD = grad_up_LFD = grad_down_LDF = None
        with torch.autocast(x_RD.device.type, enabled=False):
            grad_y_RD = grad_y_RD[: segments.end].contiguous()
            activated_RF = emulation.activation(gated_RF)
            hidden_RF = activated_RF * raised_RF
            grad_hidden_RF = _input_gradient(round_rows(grad_y_RD, emulation.scales), down_LDF, segments)
            grad_hidden_RF = grad_hidden_RF.to(x_RD.dtype)
            grad_raised_RF = activated_RF.mul_(grad_hidden_RF)
            grad_gated_RF = emulation.activation.backward(grad_hidden_RF.mul_(raised_RF), gated_RF)
            if needs_x:
                sum_RD = _input_gradient(round_rows(grad_gated_RF, emulation.scales), gate_LFD, segments)
                _input_gradient(round_rows(grad_raised_RF, emulation.scales), up_LFD, segments, sum_RD)
                grad_x_RD = _with_padding_rows(sum_RD, x_RD)
            gradient = _WeightGradient(segments, emulation, gate_LFD.shape[0], x_RD.device)
            if needs_gate or needs_up:
                x_SD = gradient.round(x_RD)
                grad_gate_LFD = gradient(gradient.round(grad_gated_RF), x_SD) if needs_gate else None
                grad_up_LFD = gradient(gradient.round(grad_raised_RF), x_SD) if needs_up else None
            if needs_down:
                grad_down_LDF = gradient(gradient.round(grad_y_RD), gradient.round(hidden_RF))
        grads = (grad_gate_LFD, grad_up_LFD, grad_down_LDF)
        grads = (grad if grad is None else grad.to(ctx.weights_dtype) for grad in grads)
        return grad_x_RD, *grads, None, None, None


def _products(x_RK: Tensor, w_LNK: Tensor, segments: Segments) -> Tensor:
    """x @ w.T per expert."""
    y_RN = x_RK.new_empty(x_RK.shape[0], w_LNK.shape[1])
    for e, start, end in segments.busy:
        torch.mm(x_RK[start:end], w_LNK[e].t(), out=y_RN[start:end])
    return y_RN


def _input_gradient(
    grad_RN: Tensor, w_LNK: Tensor, segments: Segments, add_to_RK: Tensor | None = None
) -> Tensor:
    """grad @ w per expert, added to `add_to_RK` in place where it is given."""
    grad_RK = grad_RN.new_empty(grad_RN.shape[0], w_LNK.shape[2]) if add_to_RK is None else add_to_RK
    beta = 0 if add_to_RK is None else 1
    for e, start, end in segments.busy:
        grad_RK[start:end].addmm_(grad_RN[start:end], w_LNK[e], beta=beta)
    return grad_RK


class _WeightGradient:
    """grad.T @ x per expert, of operands from `round`; exactly zero where an expert has no row."""

    def __init__(self, segments: Segments, emulation: Emulation, num_experts: int, device: torch.device):
        self.idle, self.scales, self.num_experts = segments.idle, emulation.scales, num_experts
        self.blocks = ColumnBlocks.of(segments, device) if emulation.wgrad == "fp8" else None
        self.segments = segments.busy if self.blocks is None else self.blocks.segments

    def round(self, rows_RK: Tensor) -> Tensor:
        if self.blocks is None:
            return rows_RK.bfloat16().float()
        return round_columns(rows_RK, self.blocks, self.scales)

    def __call__(self, grad_SN: Tensor, x_SK: Tensor) -> Tensor:
        grad_LNK = grad_SN.new_empty(self.num_experts, grad_SN.shape[1], x_SK.shape[1])
        for e, start, end in self.segments:
            torch.mm(grad_SN[start:end].t(), x_SK[start:end], out=grad_LNK[e])
        for e in self.idle:
            grad_LNK[e].zero_()
        return grad_LNK


def _with_padding_rows(rows_ND: Tensor, like_RD: Tensor) -> Tensor:
    """The rows in the dtype and number of `like_RD`, those past the last expert exactly zero."""
    rows_ND = rows_ND.to(like_RD.dtype)
    if rows_ND.shape == like_RD.shape:
        return rows_ND
    rows_RD = like_RD.new_zeros(like_RD.shape)
    rows_RD[: rows_ND.shape[0]] = rows_ND
    return rows_RD


def round_busy_experts(w_LNK: Tensor, segments: Segments, scales: str) -> Tensor:
    """The rounded weights of the experts that have rows; those of the others are undefined."""
    busy = [e for e, _, _ in segments.busy]
    if len(busy) == w_LNK.shape[0]:
        return round_weights(w_LNK, scales)
    rounded_LNK = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
    rounded_LNK[busy] = round_weights(w_LNK[busy], scales)
    return rounded_LNK


class RoundedWeights:
    """The rounded copies of an expert layer's weights in training: made once an optimizer step.

    A copy is used again only for the same tensors at the same addresses with the same version counters, and
    not after `drop()`. Version counters see every in-place change that autograd sees: optimizers,
    `load_state_dict`, `copy_` under `no_grad`. They miss writes through `.data` or by a foreign kernel
    (DeepSpeed): those need a call of `drop()`, which the trainer makes after every optimizer step.

    Without gradients (validation, generation) no copy is kept or used, and only experts that have rows are
    rounded: that is where weights are swapped through `.data` (averaged weights, for one), and one rounding
    costs less than a forward over a batch.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._keys: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._rounded: list[Tensor] = []

    def __reduce__(self) -> Any:
        # a copy or a pickle of a model belongs to other weights
        return RoundedWeights, ()

    def get(self, weights: tuple[Tensor, ...], scales: str) -> list[Tensor]:
        if not self._is_current(weights):
            self.drop()
            self._rounded = [round_weights(weight.detach(), scales) for weight in weights]
            # tensors of inference mode have no version counter, so their copies are never used again
            if not any(weight.is_inference() for weight in weights):
                self._keys = [(weakref.ref(w), w.data_ptr(), w._version) for w in weights]
        return self._rounded

    def _is_current(self, weights: tuple[Tensor, ...]) -> bool:
        return len(self._keys) == len(weights) and all(
            reference() is weight and address == weight.data_ptr() and version == weight._version
            for weight, (reference, address, version) in zip(weights, self._keys, strict=True)
        )
