"""`moe/compute=bf16`: the experts in bf16, whatever the dtype of the model around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertCompute, ExpertShape, why_not_these_experts
from afmoe.moe.compute.grouped import GroupedExperts
from afmoe.moe.compute.kernels import why_no_kernels
from afmoe.moe.compute.kernels.mlp import KernelMlp
from afmoe.moe.compute.node import ExpertNode
from afmoe.moe.grouped_mm import ExpertWeights, RowSource, product_dtype
from afmoe.registry import register

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.products import Products


@register("moe/compute", "bf16")
class Bf16Compute(ExpertCompute):
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

    def __init__(self, config: Config, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        activation = activation_named(shape.activation)
        self.experts = (
            ExpertNode(KernelMlp(activation, "bf16 kernels", _products))
            if config.kernels == "triton"
            else GroupedExperts(activation)
        )
        self.description = f"bf16 (operands cast to bf16, {config.kernels} kernels)"

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, shape: ExpertShape) -> str | None:
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
            return refusal or why_not_these_experts(choice, shape, instead, gate_needed=False)
        return None

    def multiply(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        dtype = product_dtype(x_RD)
        with torch.autocast(x_RD.device.type, enabled=False):
            # the products take the dtype of x: weights and biases are cast there
            return self.experts(x_RD.bfloat16(), offsets_L, weights, source).to(dtype)

    def on_weights_updated(self) -> None:
        self.experts.on_weights_updated()


def _products() -> Products:
    # needs triton, which only a machine with a GPU has to have
    from afmoe.moe.compute.kernels.bf16 import Bf16Products

    return Bf16Products()
