"""`moe/compute=bf16`: the experts in bf16, whatever the dtype of the model around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.grouped_mm import gated_mlp, product_dtype
from afmoe.registry import register


@register("moe/compute", "bf16")
class Bf16Compute:
    """Casts rows and weights to bf16, and the result back to the activations' dtype.

    Products are summed in fp32 and rounded to bf16, the activation is computed on bf16 values; gradients
    reach the weights in the weights' own dtype.
    """

    description = "bf16 (operands cast to bf16)"

    @dataclass(kw_only=True)
    class Config:
        pass

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
        return None

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor
    ) -> Tensor:
        dtype = product_dtype(x_RD)
        with torch.autocast(x_RD.device.type, enabled=False):
            x, gate, up, down = (tensor.bfloat16() for tensor in (x_RD, gate_LFD, up_LFD, down_LDF))
            return gated_mlp(x, offsets_L, gate, up, down, self.activation).to(dtype)

    def on_weights_updated(self) -> None:
        """Nothing is derived from the weights."""
