"""`moe/compute=native`: grouped products of torch in the dtype handed over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertCompute, ExpertShape
from afmoe.moe.compute.grouped import GroupedExperts
from afmoe.moe.grouped_mm import ExpertWeights, RowSource
from afmoe.registry import register


@register("moe/compute", "native")
class NativeCompute(ExpertCompute):
    """On a CPU one product per expert, in any dtype; on a GPU `torch.nn.functional.grouped_mm`.

    In fp32, and on GPUs other than sm_90 and sm_100, torch waits for the offsets in each grouped product.
    """

    description = "native (grouped products in the model's dtype)"

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        self.experts = GroupedExperts(activation_named(shape.activation))

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, shape: ExpertShape) -> str | None:
        if hardware.capability is not None and hardware.capability < (8, 0):
            return (
                "moe/compute=native needs a GPU of sm_80 or newer for torch's grouped products, this one is "
                f"{hardware.architecture}; use moe/compute=reference"
            )
        return None

    def multiply(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        return self.experts(x_RD, offsets_L, weights, source)
