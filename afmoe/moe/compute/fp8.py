"""`moe/compute=fp8`: the experts' products on e4m3 operands, block-scaled, forward and backward."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from afmoe.errors import MachineError
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute.emulation import Emulation, RoundedWeights, emulated_gated_mlp
from afmoe.moe.grouped_mm import product_dtype
from afmoe.moe.quantization import SCALE_FORMATS
from afmoe.registry import register

log = logging.getLogger(__name__)


@register("moe/compute", "fp8")
class Fp8Compute:
    """Numerics: `afmoe.moe.quantization`. Rows, weights and gradients are quantized in all three products.

    Kernels for a GPU are not written yet: there is only the exact emulation, which a CPU uses by itself and a
    GPU when asked to. On a GPU the emulation waits for the offsets once a call.
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
        device_type = (hardware or detect_hardware()).device_type
        self.emulation = Emulation(activation_named(activation), config.scales, config.wgrad)
        self.emulates_on_gpu = config.emulate == "true"
        self.rounded_weights = RoundedWeights()
        self.description = f"fp8 (e4m3, emulated on {device_type})"
        _say_once(f"moe/compute=fp8 runs as exact emulation on {device_type}: fp8's numbers, not its speed")

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
        if not hardware.is_cuda:
            return (
                "moe/compute=fp8 with moe.compute.emulate=false needs a GPU, this is a CPU; "
                "use moe.compute.emulate=auto for the exact emulation"
            )
        return _NO_KERNELS

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor
    ) -> Tensor:
        if x_RD.is_cuda and not self.emulates_on_gpu:
            raise MachineError(_NO_KERNELS)
        x_RD = x_RD.to(product_dtype(x_RD))
        weights = (gate_LFD, up_LFD, down_LDF)
        return emulated_gated_mlp(x_RD, offsets_L, weights, self.rounded_weights, self.emulation)

    def on_weights_updated(self) -> None:
        self.rounded_weights.drop()


_NO_KERNELS = (
    "moe/compute=fp8 has no kernels for a GPU yet; use moe/compute=bf16, "
    "or moe.compute.emulate=true for the exact emulation (slower than bf16)"
)


@cache
def _say_once(message: str) -> None:
    log.warning(message)
