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
from afmoe.moe.compute.kernels import why_no_kernels
from afmoe.moe.grouped_mm import gated_mlp, product_dtype
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
    ) -> str | None:
        if hardware.capability is not None and hardware.capability < (8, 0):
            return (
                f"moe/compute=bf16 needs a GPU of sm_80 or newer, this one is {hardware.architecture}; "
                "use moe/compute=reference"
            )
        if config.kernels == "triton":
            choice = "moe/compute=bf16 with moe.compute.kernels=triton"
            return why_no_kernels(choice, hardware, (8, 0), "use moe.compute.kernels=torch")
        return None

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor
    ) -> Tensor:
        dtype = product_dtype(x_RD)
        with torch.autocast(x_RD.device.type, enabled=False):
            if self.uses_kernels:
                return self.kernels(x_RD.bfloat16(), offsets_L, gate_LFD, up_LFD, down_LDF).to(dtype)
            x, gate, up, down = (tensor.bfloat16() for tensor in (x_RD, gate_LFD, up_LFD, down_LDF))
            return gated_mlp(x, offsets_L, gate, up, down, self.activation).to(dtype)

    @cached_property
    def kernels(self) -> KernelExperts:
        # needs triton, which only a machine with a GPU has to have
        from afmoe.moe.compute.kernels.autograd import KernelExperts
        from afmoe.moe.compute.kernels.bf16 import Bf16Products

        return KernelExperts(Bf16Products(), self.activation)

    def on_weights_updated(self) -> None:
        if self.uses_kernels:
            self.kernels.on_weights_updated()
