"""`moe/compute=deepgemm_fp8`: the experts' products in fp8 by DeepGEMM's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from afmoe.errors import ConfigError
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.activations import Activation, activation_named
from afmoe.moe.compute import ExpertCompute, ExpertShape, all_reasons, why_not_these_experts
from afmoe.moe.compute.deepgemm_layout import (
    ALIGNMENT,
    AlignedRows,
    Operand,
    column_operand,
    row_operand,
    weight_operands,
)
from afmoe.moe.compute.node import Backward, ExpertMlp, ExpertNode, Forward
from afmoe.moe.grouped_mm import ExpertWeights, RowSource, product_dtype
from afmoe.registry import register


@register("moe/compute", "deepgemm_fp8")
class DeepGemmFp8Compute(ExpertCompute):
    """Numerics: fp8 of `afmoe.moe.quantization`; products come back in bf16, weight gradients in fp32.

    Scales are fp32 on sm_90 and powers of two on sm_100, as DeepGEMM wants them. **No GPU has run this yet**:
    its layouts are tested on a CPU against a stand-in that follows DeepGEMM's own tests. Operands are
    quantized by plain torch. `wgrad=fp8` reads the counts on the host once a backward, because the k-grouped
    calls take a list; nothing else waits for the GPU.
    """

    @dataclass(kw_only=True)
    class Config:
        wgrad: str = "fp8"
        """Operands of the weight gradients: `fp8`, or `bf16` (torch's grouped product), without the wait."""

        def __post_init__(self) -> None:
            if self.wgrad not in ("fp8", "bf16"):
                raise ConfigError(f"moe.compute.wgrad must be one of fp8, bf16, got {self.wgrad}")

    def __init__(self, config: Config, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        capability = (hardware or detect_hardware()).capability
        is_sm_90 = capability is not None and capability[0] == 9
        scales = "fp32" if is_sm_90 else "ue8m0"
        activation = activation_named(shape.activation)
        self.experts = ExpertNode(DeepGemmMlp(activation, scales, flat=is_sm_90, wgrad=config.wgrad))
        self.description = f"deepgemm_fp8 (e4m3, DeepGEMM, {scales} scales)"

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, shape: ExpertShape) -> str | None:
        choice, reasons = "moe/compute=deepgemm_fp8", []
        if hardware.capability is None or hardware.capability[0] not in (9, 10):
            reasons.append(f"a GPU of sm_90 or sm_100, this is {hardware.architecture}")
        if not hardware.has_deep_gemm:
            reasons.append("the package deep_gemm (github.com/deepseek-ai/DeepGEMM), which is not installed")
        sizes = {"hidden_size": shape.hidden_size, "moe_intermediate_size": shape.intermediate_size}
        for name, size in sizes.items():
            if size % ALIGNMENT:
                reasons.append(f"model.{name} to be a multiple of {ALIGNMENT}, it is {size}")
        machine = f"{choice} needs {', and '.join(reasons)}; use moe/compute=fp8, or moe/compute=bf16"
        return all_reasons(
            machine if reasons else None,
            why_not_these_experts(choice, shape, "use moe/compute=native"),
        )

    def multiply(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        # of no use: x itself is kept
        return self.experts(x_RD.to(product_dtype(x_RD)), offsets_L, weights)

    def on_weights_updated(self) -> None:
        self.experts.on_weights_updated()


@dataclass(frozen=True)
class DeepGemmMlp(ExpertMlp):
    """Saved for backward: gate and up product in their slots, and where the slots are, with x."""

    activation: Activation
    scales: str
    flat: bool
    """Whether the k-grouped call is sm_90's."""
    wgrad: str
    stores_weights = True
    form = "products of x in slots"

    @cached_property
    def library(self) -> Any:
        # an optional package, which only a machine with such a GPU can build
        import deep_gemm  # pyright: ignore[reportMissingImports]

        return deep_gemm

    def multiply(self, x_SK: Tensor, weight: Operand, layout: AlignedRows) -> Tensor:
        """x @ weight.T per expert, bf16 [S, N]; zeros where DeepGEMM computes nothing."""
        out_SN = x_SK.new_zeros(x_SK.shape[0], weight[0].shape[1], dtype=torch.bfloat16)
        if len(out_SN):
            self.library.m_grouped_fp8_gemm_nt_contiguous(
                row_operand(x_SK, self.scales), weight, out_SN, layout.expert_of_slot_S
            )
        return out_SN

    def weight_gradients(
        self, pairs: Sequence[tuple[Tensor, Tensor | None]], layout: AlignedRows, dtype: torch.dtype
    ) -> list[Tensor | None]:
        """grad.T @ x per expert, for each pair (grad [S, N], x [S, K]) that has an x."""
        if self.wgrad == "bf16":
            ends_L = layout.num_slots_L.cumsum(0).to(torch.int32)
            multiply = partial(_bf16_weight_gradient, ends_L=ends_L)
        else:
            num_slots = layout.num_slots_L.tolist()
            multiply = partial(self.weight_gradient, layout=layout, num_slots=num_slots)
        return [None if x_SK is None else multiply(grad_SN, x_SK).to(dtype) for grad_SN, x_SK in pairs]

    def weight_gradient(
        self, grad_SN: Tensor, x_SK: Tensor, layout: AlignedRows, num_slots: list[int]
    ) -> Tensor:
        """grad.T @ x per expert, in fp32."""
        grad, x = (column_operand(each, num_slots, self.scales, flat=self.flat) for each in (grad_SN, x_SK))
        shape = (len(num_slots), grad_SN.shape[1], x_SK.shape[1])
        out_LNK = x_SK.new_zeros(shape, dtype=torch.float32)
        if sum(num_slots):
            name = f"k_grouped_fp8_gemm_{'nt' if self.flat else 'tn'}_contiguous"
            num_slots_L = layout.num_slots_L.to(torch.int32)
            # the last operand is what the products are added to
            getattr(self.library, name)(grad, x, out_LNK, num_slots, num_slots_L, out_LNK)
        return out_LNK

    def store(self, weights: ExpertWeights, offsets_L: Tensor | None = None) -> list[tuple[Operand, Operand]]:
        """Of gate, up and down: the operands of y = x w.T and of dx = dy w."""
        projections = (weights.gate_LFD, weights.up_LFD, weights.down_LDF)
        return [weight_operands(weight, self.scales) for weight in projections if weight is not None]

    def forward(self, given: Forward, stored: list[tuple[Operand, Operand]]) -> tuple[Tensor, list[Tensor]]:
        layout = AlignedRows.of(given.offsets_L, given.x_RD.shape[0])
        gate, up, down = (forward for forward, _ in stored)
        x_SD = layout.spread(given.x_RD)
        gated_SF, raised_SF = self.multiply(x_SD, gate, layout), self.multiply(x_SD, up, layout)
        y_SD = self.multiply(self.activation.hidden(gated_SF, raised_SF), down, layout)
        y_RD = layout.gather(y_SD).to(given.x_RD.dtype)
        return y_RD, [gated_SF, raised_SF, *vars(layout).values()]

    def saved_like(self, given: Forward) -> list[Tensor]:
        layout = AlignedRows.of(given.offsets_L, given.x_RD.shape[0])
        num_slots, size = layout.row_of_slot_S.shape[0], given.weights.up_LFD.shape[1]
        products = (given.x_RD.new_empty(num_slots, size, dtype=torch.bfloat16) for _ in range(2))
        return [*products, *vars(layout).values()]

    def backward(self, given: Backward, stored: list[tuple[Operand, Operand]]) -> list[Tensor | None]:
        gated_SF, raised_SF, *slots = given.saved
        layout = AlignedRows(*slots)
        gate, up, down = (backward for _, backward in stored)
        grad_y_SD = layout.spread(given.grad_y_RD)
        grad_hidden_SF = self.multiply(grad_y_SD, down, layout)
        hidden_SF, (grad_gated_SF, grad_raised_SF) = self.activation.hidden_backward(
            grad_hidden_SF, gated_SF, raised_SF
        )
        grad_x_RD = None
        if given.needed[0]:
            grad_x_SD = self.multiply(grad_gated_SF, gate, layout).float()
            grad_x_SD += self.multiply(grad_raised_SF, up, layout)
            grad_x_RD = layout.gather(grad_x_SD).to(given.grad_y_RD.dtype)
        grads: list[Tensor | None] = [None] * 6
        if any(given.needed[1:4]):
            needs_gate, needs_up, needs_down = given.needed[1:4]
            # for nothing else x is kept
            x_SD = layout.spread(given.rows.all()) if needs_gate or needs_up else None
            pairs = [
                (grad_gated_SF, x_SD if needs_gate else None),
                (grad_raised_SF, x_SD if needs_up else None),
                (grad_y_SD, hidden_SF if needs_down else None),
            ]
            grads[:3] = self.weight_gradients(pairs, layout, given.weights.up_LFD.dtype)
        return [grad_x_RD, *grads]


def _bf16_weight_gradient(grad_SN: Tensor, x_SK: Tensor, ends_L: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(grad_SN.bfloat16().t(), x_SK.bfloat16(), offs=ends_L)
