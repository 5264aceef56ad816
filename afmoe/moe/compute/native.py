"""`moe/compute=native`: grouped products of torch in the dtype handed over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertCompute, ExpertShape
from afmoe.moe.compute.cpu_choice import TRISTATE, check_options, cpu_kernels_for, why_not_compiled
from afmoe.moe.compute.grouped import GroupedExperts
from afmoe.moe.grouped_mm import ExpertWeights, RowSource
from afmoe.registry import register


@register("moe/compute", "native")
class NativeCompute(ExpertCompute):
    """On a GPU `torch.nn.functional.grouped_mm`; on a CPU in fp32 kernels compiled there, else `torch.mm`.

    In fp32, and on GPUs other than sm_90 and sm_100, torch waits for the offsets in each grouped product.
    """

    @dataclass(kw_only=True)
    class Config:
        compiled: str | bool = "auto"
        """Kernels for fp32 on a CPU. `auto`: where a C compiler is at hand. `true`: refuse without."""

        def __post_init__(self) -> None:
            check_options(self, compiled=TRISTATE)

    def __init__(self, config: Config, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        hardware = hardware or detect_hardware()
        kernels = cpu_kernels_for("moe/compute=native", config.compiled, hardware)
        self.experts = GroupedExperts(activation_named(shape.activation), kernels)
        way = "torch's grouped products, in the model's dtype"
        if kernels is not None:
            way = "products compiled for this CPU in fp32, torch's in other dtypes"
        self.description = f"native ({way})"

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, shape: ExpertShape) -> str | None:
        if hardware.capability is not None and hardware.capability < (8, 0):
            return (
                "moe/compute=native needs a GPU of sm_80 or newer for torch's grouped products, this one is "
                f"{hardware.architecture}; use moe/compute=reference"
            )
        return why_not_compiled("moe/compute=native", config.compiled, hardware)

    def multiply(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        return self.experts(x_RD, offsets_L, weights, source)
