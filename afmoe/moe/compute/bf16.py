"""`moe/compute=bf16`: the experts in bf16, whatever the dtype of the model around them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import why_not_these_experts
from afmoe.moe.compute.kernels import why_no_kernels
from afmoe.moe.grouped_mm import Biases, RowSource, expert_mlp, product_dtype
from afmoe.registry import register

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.autograd import KernelExperts


@register("moe/compute", "bf16")
class Bf16Compute:
    """Casts rows and weights to bf16, and the result back to the activations' dtype.

    Products are summed in fp32 and rounded to bf16, the activation is computed on bf16 values; gradients
    reach the weights in the weights' own dtype.
    """

    @dataclass(kw_only=True)
    class Config:
        kernels: str = "torch"
        """`torch`: torch's grouped products. `triton`: this project's kernels, on a GPU; bf16 copies of fp32
        weights are then made once an optimizer step."""

        def __post_init__(self) -> None:
            if self.kernels not in ("torch", "triton"):
                raise ConfigError(f"moe.compute.kernels must be torch or triton, got {self.kernels}")

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
        self.activation = activation_named(activation)
        self.uses_kernels = config.kernels == "triton"
        self.description = f"bf16 (operands cast to bf16, {config.kernels} kernels)"

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
        if hardware.capability is not None and hardware.capability < (8, 0):
            return (
                f"moe/compute=bf16 needs a GPU of sm_80 or newer, this one is {hardware.architecture}; "
                "use moe/compute=reference"
            )
        if config.kernels == "triton":
            choice, instead = (
                "moe/compute=bf16 with moe.compute.kernels=triton",
                "use moe.compute.kernels=torch",
            )
            refusal = why_no_kernels(choice, hardware, (8, 0), instead)
            # the kernels need no gate
            return refusal or why_not_these_experts(choice, True, has_bias, instead)
        return None

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
        dtype = product_dtype(x_RD)
        with torch.autocast(x_RD.device.type, enabled=False):
            x_RD = x_RD.bfloat16()
            if self.uses_kernels:
                return self.kernels(x_RD, offsets_L, gate_LFD, up_LFD, down_LDF, source).to(dtype)
            weights = (gate_LFD, up_LFD, down_LDF)
            # the products take the dtype of x: weights and biases are cast there
            return expert_mlp(x_RD, offsets_L, *weights, self.activation, biases, source).to(dtype)

    @cached_property
    def kernels(self) -> KernelExperts:
        # needs triton, which only a machine with a GPU has to have
        from afmoe.moe.compute.kernels.autograd import KernelExperts
        from afmoe.moe.compute.kernels.bf16 import Bf16Products

        return KernelExperts(Bf16Products(), self.activation)

    def on_weights_updated(self) -> None:
        if self.uses_kernels:
            self.kernels.on_weights_updated()
