"""`moe/compute=deepgemm_fp8`: the experts' products in fp8 by DeepGEMM's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.errors import ConfigError
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.activations import Activation, activation_named
from afmoe.moe.compute import all_reasons, why_not_these_experts
from afmoe.moe.compute.deepgemm_layout import (
    ALIGNMENT,
    AlignedRows,
    Operand,
    column_operand,
    row_operand,
    weight_operands,
)
from afmoe.moe.compute.weight_copies import WeightCopies
from afmoe.moe.grouped_mm import Biases, RowSource, product_dtype
from afmoe.registry import register


@register("moe/compute", "deepgemm_fp8")
class DeepGemmFp8Compute:
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

    def __init__(
        self,
        config: Config,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        hardware: Hardware | None = None,
    ) -> None:
        capability = (hardware or detect_hardware()).capability
        is_sm_90 = capability is not None and capability[0] == 9
        self.activation = activation_named(activation)
        self.products = DeepGemmProducts(
            scales="fp32" if is_sm_90 else "ue8m0", flat=is_sm_90, wgrad=config.wgrad
        )
        self.weight_copies = WeightCopies()
        self.description = f"deepgemm_fp8 (e4m3, DeepGEMM, {self.products.scales} scales)"

    @classmethod
    def why_not(
        cls,
        config: Config,
        *,
        hardware: Hardware,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        gated: bool = True,
        has_bias: bool = False,
    ) -> str | None:
        choice, reasons = "moe/compute=deepgemm_fp8", []
        if hardware.capability is None or hardware.capability[0] not in (9, 10):
            reasons.append(f"a GPU of sm_90 or sm_100, this is {hardware.architecture}")
        if not hardware.has_deep_gemm:
            reasons.append("the package deep_gemm (github.com/deepseek-ai/DeepGEMM), which is not installed")
        for name, size in (("hidden_size", hidden_size), ("moe_intermediate_size", intermediate_size)):
            if size % ALIGNMENT:
                reasons.append(f"model.{name} to be a multiple of {ALIGNMENT}, it is {size}")
        machine = f"{choice} needs {', and '.join(reasons)}; use moe/compute=fp8, or moe/compute=bf16"
        return all_reasons(
            machine if reasons else None,
            why_not_these_experts(choice, gated, has_bias, "use moe/compute=native"),
        )

    # weights are known by address and version, which a compiled graph does not have
    @torch.compiler.disable
    def __call__(
        self,
        x_RD: Tensor,
        offsets_L: Tensor,
        gate_LFD: Tensor | None,
        up_LFD: Tensor,
        down_LDF: Tensor,
        biases: Biases | None = None,
        source: RowSource | None = None,
    ) -> Tensor:
        assert gate_LFD is not None
        assert biases is None
        dtype, weights = product_dtype(x_RD), (gate_LFD, up_LFD, down_LDF)
        if torch.is_grad_enabled():
            stored = self.weight_copies.of(weights, self._store)
        else:
            stored = self._store(weights)
        y_RD = _DeepGemmMlp.apply(x_RD, *weights, offsets_L, stored, self.products, self.activation)
        return y_RD.to(dtype)

    def on_weights_updated(self) -> None:
        self.weight_copies.drop()

    def _store(self, weights: tuple[Tensor, ...]) -> list[tuple[Operand, Operand]]:
        return [weight_operands(weight.detach(), self.products.scales) for weight in weights]


@dataclass(frozen=True)
class DeepGemmProducts:
    scales: str
    flat: bool
    """Whether the k-grouped call is sm_90's."""
    wgrad: str

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
        self, pairs: list[tuple[Tensor, Tensor]], layout: AlignedRows, dtype: torch.dtype
    ) -> list[Tensor]:
        """grad.T @ x per expert, for each pair (grad [S, N], x [S, K])."""
        if self.wgrad == "bf16":
            ends_L = layout.num_slots_L.cumsum(0).to(torch.int32)
            return [
                torch.nn.functional.grouped_mm(grad_SN.bfloat16().t(), x_SK.bfloat16(), offs=ends_L).to(dtype)
                for grad_SN, x_SK in pairs
            ]
        num_slots = layout.num_slots_L.tolist()
        num_slots_L = layout.num_slots_L.to(torch.int32)
        name = f"k_grouped_fp8_gemm_{'nt' if self.flat else 'tn'}_contiguous"
        grads = []
        for grad_SN, x_SK in pairs:
            grad, x = (
                column_operand(operand, num_slots, self.scales, flat=self.flat) for operand in (grad_SN, x_SK)
            )
            shape = (len(num_slots), grad_SN.shape[1], x_SK.shape[1])
            out_LNK = x_SK.new_zeros(shape, dtype=torch.float32)
            if sum(num_slots):
                # the last operand is what the products are added to
                getattr(self.library, name)(grad, x, out_LNK, num_slots, num_slots_L, out_LNK)
            grads.append(out_LNK.to(dtype))
        return grads


class _DeepGemmMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_LFD: Tensor,
        up_LFD: Tensor,
        down_LDF: Tensor,
        offsets_L: Tensor,
        stored: list[tuple[Operand, Operand]],
        products: DeepGemmProducts,
        activation: Activation,
    ) -> Tensor:
        layout = AlignedRows.of(offsets_L, x_RD.shape[0])
        gate, up, down = (forward for forward, _ in stored)
        with torch.autocast(x_RD.device.type, enabled=False):
            x_SD = layout.spread(x_RD)
            gated_SF = products.multiply(x_SD, gate, layout)
            raised_SF = products.multiply(x_SD, up, layout)
            y_SD = products.multiply(activation.hidden(gated_SF, raised_SF), down, layout)
        ctx.save_for_backward(x_RD, gated_SF, raised_SF)
        ctx.layout, ctx.products, ctx.activation = layout, products, activation
        ctx.weights = [backward for _, backward in stored]
        ctx.weights_dtype = gate_LFD.dtype
        return layout.gather(y_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RD, gated_SF, raised_SF = ctx.saved_tensors
        gate, up, down = ctx.weights
        layout: AlignedRows = ctx.layout
        products: DeepGemmProducts = ctx.products
        with torch.autocast(grad_y_RD.device.type, enabled=False):
            grad_y_SD = layout.spread(grad_y_RD)
            grad_hidden_SF = products.multiply(grad_y_SD, down, layout)
            hidden_SF, (grad_gated_SF, grad_raised_SF) = ctx.activation.hidden_backward(
                grad_hidden_SF, gated_SF, raised_SF
            )
            grad_x_RD = None
            if ctx.needs_input_grad[0]:
                grad_x_SD = products.multiply(grad_gated_SF, gate, layout).float()
                grad_x_SD += products.multiply(grad_raised_SF, up, layout)
                grad_x_RD = layout.gather(grad_x_SD).to(x_RD.dtype)
            grads: list[Tensor | None] = [None, None, None]
            if any(ctx.needs_input_grad[1:4]):
                x_SD = layout.spread(x_RD)
                pairs = [(grad_gated_SF, x_SD), (grad_raised_SF, x_SD), (grad_y_SD, hidden_SF)]
                grads = [*products.weight_gradients(pairs, layout, ctx.weights_dtype)]
        return grad_x_RD, *grads, None, None, None, None
