"""`moe/compute=mxfp8`: the experts' products on e4m3 operands in blocks of 32, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from afmoe.moe.compute.cpu_choice import TRISTATE, check_options
from afmoe.moe.compute.quantized import QuantizedCompute
from afmoe.moe.compute.rounding import Mxfp8Rounding, Rounder
from afmoe.registry import register

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.mxfp8 import Mxfp8Products


@register("moe/compute", "mxfp8")
class Mxfp8Compute(QuantizedCompute):
    """Numerics: `afmoe.moe.quantization`. Rows, weights and gradients are quantized in all three products.

    A GPU from sm_100 on, whose tensor cores apply the scales, runs Triton kernels. A CPU runs the exact
    emulation, and so does a GPU when asked to, waiting for the offsets once a call.
    """

    capability = (10, 0)

    @dataclass(kw_only=True)
    class Config:
        wgrad: str = "mxfp8"
        """Operands of the weight gradients: `mxfp8`, or `bf16` for less rounding error."""
        emulate: str | bool = "auto"
        """`auto`: emulate on a CPU, never on a GPU. `true`: emulate anywhere. `false`: nowhere."""

        compiled: str | bool = "auto"
        """Kernels for the emulation on a CPU. `auto`: with a C compiler at hand. `true`: refuse without."""

        def __post_init__(self) -> None:
            check_options(self, wgrad=("mxfp8", "bf16"), emulate=TRISTATE, compiled=TRISTATE)

    @classmethod
    def rounding(cls, config: Config, rounder: Rounder) -> Mxfp8Rounding:
        return Mxfp8Rounding(rounder)

    @classmethod
    def products(cls, config: Config) -> Mxfp8Products:
        from afmoe.moe.compute.kernels.mxfp8 import Mxfp8Products

        return Mxfp8Products(config.wgrad)
