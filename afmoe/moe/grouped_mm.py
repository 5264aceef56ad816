"""The gated MLP of many experts on rows sorted by expert, in the dtype handed over, forward and backward.

Two ways, one autograd node. Both save x and the two products before the activation, and compute the
activation again in backward: that costs one pass over the rows and saves two tensors of their size.

- On a CPU: `torch.mm` per expert, results and weight gradients written in place. One expert after the other,
  so that its rows stay in the cache between the products.
- On a GPU: `torch.nn.functional.grouped_mm`, which reads the offsets on the device.

Under `torch.compile` the node is the operator `afmoe::gated_mlp`, opaque to the compiler: its graph neither
breaks where the offsets are read nor is made anew when they change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.errors import ConfigError
from afmoe.moe.activations import Activation, activation_named


def gated_mlp(
    x_RD: Tensor,
    offsets_L: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    activation: Activation,
) -> Tensor:
    """(activation(x @ gate.T) * (x @ up.T)) @ down.T per expert. Contract: `afmoe.moe.compute`."""
    dtype = product_dtype(x_RD)
    x_RD, gate_LFD, up_LFD, down_LDF = (t.to(dtype) for t in (x_RD, gate_LFD, up_LFD, down_LDF))
    way = gated_mlp_by_grouped_mm if x_RD.is_cuda else gated_mlp_by_segments
    return way(x_RD, offsets_L, gate_LFD, up_LFD, down_LDF, activation)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which `x` enters a product here: the autocast dtype under autocast, else its own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


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


def gated_mlp_by_segments(
    x_RD: Tensor,
    offsets_L: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    activation: Activation,
) -> Tensor:
    """`gated_mlp` as one `torch.mm` per expert and product: any dtype, any size, host offsets."""
    return _node(x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, activation, False)


def _segments_forward(
    x_RD: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    offsets_L: Tensor,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = Segments.of(offsets_L)
    x_RD = x_RD.contiguous()
    gated_RF = x_RD.new_empty(x_RD.shape[0], gate_LFD.shape[1])
    raised_RF = torch.empty_like(gated_RF)
    y_RD = torch.empty_like(x_RD)
    for e, start, end in segments.busy:
        x, gated, raised = x_RD[start:end], gated_RF[start:end], raised_RF[start:end]
        torch.mm(x, gate_LFD[e].t(), out=gated)
        torch.mm(x, up_LFD[e].t(), out=raised)
        torch.mm(activation(gated) * raised, down_LDF[e].t(), out=y_RD[start:end])
    y_RD[segments.end :].zero_()
    return y_RD, gated_RF, raised_RF


def _segments_backward(
    grad_y_RD: Tensor, saved: Sequence[Tensor], activation: Activation, needed: list[bool]
) -> list[Tensor | None]:
    x_RD, gated_RF, raised_RF, gate_LFD, up_LFD, down_LDF, offsets_L = saved
    segments = Segments.of(offsets_L)
    grad_y_RD, x_RD = grad_y_RD.contiguous(), x_RD.contiguous()
    grad_x_RD, *grad_weights = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if is_needed else None
        for tensor, is_needed in zip((x_RD, gate_LFD, up_LFD, down_LDF), needed, strict=True)
    )
    grad_gate_LFD, grad_up_LFD, grad_down_LDF = grad_weights
    for e, start, end in segments.busy:
        x, gated, raised, grad_y = (rows[start:end] for rows in (x_RD, gated_RF, raised_RF, grad_y_RD))
        activated = activation(gated)
        if grad_down_LDF is not None:
            torch.mm(grad_y.t(), activated * raised, out=grad_down_LDF[e])
        grad_hidden = torch.mm(grad_y, down_LDF[e])
        grad_raised = activated.mul_(grad_hidden)
        grad_gated = activation.backward(grad_hidden.mul_(raised), gated)
        if grad_gate_LFD is not None:
            torch.mm(grad_gated.t(), x, out=grad_gate_LFD[e])
        if grad_up_LFD is not None:
            torch.mm(grad_raised.t(), x, out=grad_up_LFD[e])
        if grad_x_RD is not None:
            grad_x = torch.mm(grad_gated, gate_LFD[e], out=grad_x_RD[start:end])
            grad_x.addmm_(grad_raised, up_LFD[e])
    if grad_x_RD is not None:
        grad_x_RD[segments.end :].zero_()
    for grad, e in itertools.product(grad_weights, segments.idle):
        if grad is not None:
            grad[e].zero_()
    return [grad_x_RD, *grad_weights]


def gated_mlp_by_grouped_mm(
    x_RD: Tensor,
    offsets_L: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    activation: Activation,
) -> Tensor:
    """`gated_mlp` by `torch.nn.functional.grouped_mm`: bf16, fp16 or fp32.

    In bf16 on GPUs of sm_90 and sm_100 the offsets stay on the device. Elsewhere torch itself reads them on
    the host and loops over the experts (aten/src/ATen/native/cuda/GroupedBlas.cpp, torch 2.10).
    """
    hidden_size, intermediate_size = x_RD.shape[1], gate_LFD.shape[1]
    # rows of every operand must start at multiples of 16 bytes; zero columns change no product
    multiple = 16 // x_RD.element_size()
    pad_hidden, pad_intermediate = -hidden_size % multiple, -intermediate_size % multiple
    if pad_hidden or pad_intermediate:
        x_RD = F.pad(x_RD, (0, pad_hidden))
        gate_LFD = F.pad(gate_LFD, (0, pad_hidden, 0, pad_intermediate))
        up_LFD = F.pad(up_LFD, (0, pad_hidden, 0, pad_intermediate))
        down_LDF = F.pad(down_LDF, (0, pad_intermediate, 0, pad_hidden))
    y_RD = _node(x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, activation, True)
    return y_RD[:, :hidden_size] if pad_hidden else y_RD


def _grouped_mm_forward(
    x_RD: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    offsets_L: Tensor,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    x_RD = x_RD.contiguous()
    gated_RF = F.grouped_mm(x_RD, gate_LFD.transpose(1, 2), offs=offsets_L)
    raised_RF = F.grouped_mm(x_RD, up_LFD.transpose(1, 2), offs=offsets_L)
    y_RD = F.grouped_mm(activation(gated_RF) * raised_RF, down_LDF.transpose(1, 2), offs=offsets_L)
    return _zero_padding_rows(y_RD, offsets_L), gated_RF, raised_RF


def _grouped_mm_backward(
    grad_y_RD: Tensor, saved: Sequence[Tensor], activation: Activation, needed: list[bool]
) -> list[Tensor | None]:
    x_RD, gated_RF, raised_RF, gate_LFD, up_LFD, down_LDF, offsets_L = saved
    needs_x, needs_gate, needs_up, needs_down = needed
    grad_y_RD, x_RD = grad_y_RD.contiguous(), x_RD.contiguous()
    grad_x_RD = grad_gate_LFD = grad_up_LFD = grad_down_LDF = None
    activated_RF = activation(gated_RF)
    if needs_down:
        grad_down_LDF = _weight_gradient(grad_y_RD, activated_RF * raised_RF, offsets_L)
    grad_hidden_RF = F.grouped_mm(grad_y_RD, down_LDF, offs=offsets_L)
    grad_raised_RF = activated_RF.mul_(grad_hidden_RF)
    grad_gated_RF = activation.backward(grad_hidden_RF.mul_(raised_RF), gated_RF)
    if needs_gate:
        grad_gate_LFD = _weight_gradient(grad_gated_RF, x_RD, offsets_L)
    if needs_up:
        grad_up_LFD = _weight_gradient(grad_raised_RF, x_RD, offsets_L)
    if needs_x:
        grad_x_RD = F.grouped_mm(grad_gated_RF, gate_LFD, offs=offsets_L)
        grad_x_RD += F.grouped_mm(grad_raised_RF, up_LFD, offs=offsets_L)
        _zero_padding_rows(grad_x_RD, offsets_L)
    return [grad_x_RD, grad_gate_LFD, grad_up_LFD, grad_down_LDF]


def _zero_padding_rows(rows_RD: Tensor, offsets_L: Tensor) -> Tensor:
    """Zero the rows that `grouped_mm` leaves unwritten, in place, without reading the offset on the host."""
    is_padding_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) >= offsets_L[-1]
    return rows_RD.masked_fill_(is_padding_R[:, None], 0.0)


def _weight_gradient(grad_RN: Tensor, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
    grad_LNK = F.grouped_mm(grad_RN.t(), x_RK, offs=offsets_L)
    if x_RK.is_cuda and torch.cuda.get_device_capability(x_RK.device)[0] >= 10:
        # pytorch#172439: on sm_100 an empty group's gradient is not written
        is_empty_L = offsets_L.diff(prepend=offsets_L.new_zeros(1)) == 0
        grad_LNK.masked_fill_(is_empty_L[:, None, None], 0.0)
    return grad_LNK


def _node(
    x_RD: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    offsets_L: Tensor,
    activation: Activation,
    by_grouped_mm: bool,
) -> Tensor:
    if not torch.compiler.is_compiling():
        return _GatedMlp.apply(x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, activation, by_grouped_mm)
    if not activation.has_derivative:
        raise ConfigError(
            f"hidden_act={activation.name} cannot be compiled, because its derivative is taken by autograd "
            "inside an operator; run without torch.compile"
        )
    return _gated_mlp(x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, activation.name, by_grouped_mm)[0]


def _forward(
    x_RD: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    offsets_L: Tensor,
    activation: Activation,
    by_grouped_mm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y and, for backward, the two products before the activation."""
    forward = _grouped_mm_forward if by_grouped_mm else _segments_forward
    # the operands have their dtype already
    with torch.autocast(x_RD.device.type, enabled=False):
        return forward(x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, activation)


def _backward(
    grad_y_RD: Tensor,
    saved: Sequence[Tensor],
    activation: Activation,
    by_grouped_mm: bool,
    needed: list[bool],
) -> list[Tensor | None]:
    """Gradients of x and the three weights, where `needed`. `saved` as `_save` has it."""
    backward = _grouped_mm_backward if by_grouped_mm else _segments_backward
    with torch.autocast(grad_y_RD.device.type, enabled=False):
        return backward(grad_y_RD, saved, activation, needed)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, ctx.activation, ctx.by_grouped_mm = inputs
    _, gated_RF, raised_RF = output
    ctx.save_for_backward(x_RD, gated_RF, raised_RF, gate_LFD, up_LFD, down_LDF, offsets_L)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = list(ctx.needs_input_grad[:4])
        grads = _backward(grad_y_RD, ctx.saved_tensors, ctx.activation, ctx.by_grouped_mm, needed)
        return *grads, None, None, None


@torch.library.custom_op("afmoe::gated_mlp", mutates_args=())
def _gated_mlp(
    x_RD: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    offsets_L: Tensor,
    activation: str,
    by_grouped_mm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x_RD, gate_LFD, up_LFD, down_LDF, offsets_L, activation_named(activation), by_grouped_mm)


@_gated_mlp.register_fake
def _(x_RD: Tensor, gate_LFD: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows_RF = x_RD.new_empty(x_RD.shape[0], gate_LFD.shape[1])
    return x_RD.new_empty(x_RD.shape), rows_RF, torch.empty_like(rows_RF)


@torch.library.custom_op("afmoe::gated_mlp_backward", mutates_args=())
def _gated_mlp_backward(
    grad_y_RD: Tensor, saved: Sequence[Tensor], activation: str, by_grouped_mm: bool, needed: list[bool]
) -> list[Tensor]:
    """Those gradients that are needed, in `_backward`'s order."""
    grads = _backward(grad_y_RD, saved, activation_named(activation), by_grouped_mm, needed)
    return [grad for grad in grads if grad is not None]


@_gated_mlp_backward.register_fake
def _(grad_y_RD: Tensor, saved: Sequence[Tensor], activation: str, by_grouped_mm: bool, needed: list[bool]):
    x_RD, _, _, *weights, _ = saved
    return [
        tensor.new_empty(tensor.shape)
        for tensor, is_needed in zip((x_RD, *weights), needed, strict=True)
        if is_needed
    ]


def _save_in_graph(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)
    # the two products go nowhere else; zeros for their gradients would be two tensors of their size
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_y_RD: Tensor, *_: None) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:4])
    grads = iter(
        _gated_mlp_backward(grad_y_RD, list(ctx.saved_tensors), ctx.activation, ctx.by_grouped_mm, needed)
    )
    return *(next(grads) if is_needed else None for is_needed in needed), None, None, None


_gated_mlp.register_autograd(_differentiate, setup_context=_save_in_graph)
