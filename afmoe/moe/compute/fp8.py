"""`moe/compute=fp8`: the experts' products on e4m3 operands, block-scaled, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from afmoe.moe.compute.cpu_choice import TRISTATE, check_options
from afmoe.moe.compute.quantized import QuantizedCompute
from afmoe.moe.compute.rounding import Fp8Rounding, Rounder
from afmoe.moe.quantization import SCALE_FORMATS
from afmoe.registry import register

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.fp8 import Fp8Products


@register("moe/compute", "fp8")
class Fp8Compute(QuantizedCompute):
    """Numerics: `afmoe.moe.quantization`. Rows, weights and gradients are quantized in all three products.

    A GPU from sm_89 on runs Triton kernels. A CPU runs the exact emulation, and so does a GPU when asked to,
    waiting for the offsets once a call.
    """

    capability = (8, 9)

    @dataclass(kw_only=True)
    class Config:
        scales: str = "fp32"
        """Block scales: `fp32`, or `ue8m0`, powers of two, as GPUs of sm_100 want them."""
        wgrad: str = "fp8"
        """Operands of the weight gradients: `fp8`, or `bf16` for less rounding error."""
        emulate: str | bool = "auto"
        """`auto`: emulate on a CPU, never on a GPU. `true`: emulate anywhere. `false`: nowhere."""

        compiled: str | bool = "auto"
        """Kernels for the emulation on a CPU. `auto`: with a C compiler at hand. `true`: refuse without."""

        def __post_init__(self) -> None:
            check_options(
                self, scales=SCALE_FORMATS, wgrad=("fp8", "bf16"), emulate=TRISTATE, compiled=TRISTATE
            )

    @classmethod
    def rounding(cls, config: Config, rounder: Rounder) -> Fp8Rounding:
        return Fp8Rounding(rounder, config.scales)

    @classmethod
    def products(cls, config: Config) -> Fp8Products:
        from afmoe.moe.compute.kernels.fp8 import Fp8Products

        return Fp8Products(config.scales, config.wgrad)
