"""`moe/compute=fp8`: the experts' products on e4m3 operands, block-scaled, forward and backward."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute.emulation import Emulation, RoundedWeights, emulated_gated_mlp
from afmoe.moe.compute.kernels import why_no_kernels
from afmoe.moe.grouped_mm import product_dtype
from afmoe.moe.quantization import SCALE_FORMATS
from afmoe.registry import register

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.autograd import KernelExperts

log = logging.getLogger(__name__)


@register("moe/compute", "fp8")
class Fp8Compute:
    """Numerics: `afmoe.moe.quantization`. Rows, weights and gradients are quantized in all three products.

    A GPU from sm_89 on runs Triton kernels. A CPU runs the exact emulation, and so does a GPU when asked to,
    waiting for the offsets once a call.
    """

    @dataclass(kw_only=True)
    class Config:
        scales: str = "fp32"
        """Block scales: `fp32`, or `ue8m0`, powers of two, as GPUs of sm_100 want them."""
        wgrad: str = "fp8"
        """Operands of the weight gradients: `fp8`, or `bf16` for less rounding error."""
        emulate: str | bool = "auto"
        """`auto`: emulate on a CPU, never on a GPU. `true`: emulate anywhere. `false`: nowhere."""

        def __post_init__(self) -> None:
            self.emulate = str(self.emulate).lower()
            for key, valid in (
                ("scales", SCALE_FORMATS),
                ("wgrad", ("fp8", "bf16")),
                ("emulate", ("auto", "true", "false")),
            ):
                if (value := getattr(self, key)) not in valid:
                    raise ValueError(f"moe.compute.{key} must be one of {', '.join(valid)}, got {value}")

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
        hardware = hardware or detect_hardware()
        self.emulation = Emulation(activation_named(activation), config.scales, config.wgrad)
        self.emulates = config.emulate == "true" or not hardware.is_cuda
        self.rounded_weights = RoundedWeights()
        if self.emulates:
            where = hardware.device_type
            self.description = f"fp8 (e4m3, emulated on {where})"
            _say_once(f"moe/compute=fp8 runs as exact emulation on {where}: fp8's numbers, not its speed")
        else:
            self.description = "fp8 (e4m3, Triton kernels)"
            _say_once(
                "moe/compute=fp8 runs Triton kernels that were not timed on a GPU yet: with many small "
                "experts they may be slower than moe/compute=native; scripts/check_gpu.py measures both"
            )

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
        if config.emulate == "true" or (config.emulate == "auto" and not hardware.is_cuda):
            return None
        choice, instead = (
            "moe/compute=fp8",
            "use moe/compute=bf16, or moe.compute.emulate=true, which is slower",
        )
        if not hardware.is_cuda:
            choice += " with moe.compute.emulate=false"
            instead = "use moe.compute.emulate=auto for the exact emulation"
        return why_no_kernels(choice, hardware, (8, 9), instead)

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor
    ) -> Tensor:
        x_RD = x_RD.to(product_dtype(x_RD))
        weights = (gate_LFD, up_LFD, down_LDF)
        if not self.emulates:
            return self.kernels(x_RD, offsets_L, *weights)
        return emulated_gated_mlp(x_RD, offsets_L, weights, self.rounded_weights, self.emulation)

    @cached_property
    def kernels(self) -> KernelExperts:
        # needs triton, which only a machine with a GPU has to have
        from afmoe.moe.compute.kernels.autograd import KernelExperts
        from afmoe.moe.compute.kernels.fp8 import Fp8Products

        products = Fp8Products(self.emulation.scales, self.emulation.wgrad)
        return KernelExperts(products, self.emulation.activation)

    def on_weights_updated(self) -> None:
        if self.emulates:
            self.rounded_weights.drop()
        else:
            self.kernels.on_weights_updated()


@cache
def _say_once(message: str) -> None:
    log.warning(message)
