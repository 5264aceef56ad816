"""What `fp8` and `mxfp8` share: kernels on a GPU, the exact emulation elsewhere, or when asked to."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertCompute, ExpertShape, all_reasons, why_not_these_experts
from afmoe.moe.compute.cpu_choice import cpu_kernels_for, say_once, why_not_compiled
from afmoe.moe.compute.emulation import Emulation
from afmoe.moe.compute.kernels import why_no_kernels
from afmoe.moe.compute.kernels.mlp import KernelMlp
from afmoe.moe.compute.node import ExpertNode
from afmoe.moe.compute.rounding import Rounder, Rounding
from afmoe.moe.compute.rounding_by_kernels import KernelRounder
from afmoe.moe.compute.rounding_by_torch import TorchRounder
from afmoe.moe.grouped_mm import CompiledProducts, ExpertWeights, RowSource, TorchProducts, product_dtype

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.products import Products


class QuantizedCompute(ExpertCompute):
    """A plugin's `Config` has `wgrad`, the format's own name or `bf16`, `emulate` and `compiled`."""

    capability: ClassVar[tuple[int, int]]
    """CUDA capability from which on the kernels run."""

    def __init__(self, config: Any, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        hardware = hardware or detect_hardware()
        activation = activation_named(shape.activation)
        choice = f"moe/compute={self.name}"
        if config.emulate == "true" or not hardware.is_cuda:
            kernels = cpu_kernels_for(choice, config.compiled, hardware)
            rounder = TorchRounder() if kernels is None else KernelRounder(kernels)
            mlp = Emulation(
                activation,
                self.rounding(config, rounder),
                TorchProducts() if kernels is None else CompiledProducts(kernels),
                wgrad_in_bf16=config.wgrad == "bf16",
            )
            where = hardware.device_type
            self.description = f"{self.name} (e4m3, emulated on {where})"
            say_once(f"{choice} runs as exact emulation on {where}: {self.name}'s numbers, not its speed")
        else:
            form = f"{self.name} kernels, wgrad={config.wgrad}"
            mlp = KernelMlp(activation, form, partial(self.products, config))
            self.description = f"{self.name} (e4m3, Triton kernels)"
            say_once(
                f"{choice} runs Triton kernels that were not timed on a GPU yet: with many small "
                "experts they may be slower than moe/compute=native; scripts/check_gpu.py measures both"
            )
        self.experts = ExpertNode(mlp)

    @classmethod
    @abstractmethod
    def rounding(cls, config: Any, rounder: Rounder) -> Rounding:
        """The block format that `config` chooses."""

    @classmethod
    @abstractmethod
    def products(cls, config: Any) -> Products:
        """Its kernels. Needs triton, which only a machine with a GPU has to have."""

    @classmethod
    def why_not(cls, config: Any, *, hardware: Hardware, shape: ExpertShape) -> str | None:
        choice = f"moe/compute={cls.name}"
        experts = why_not_these_experts(choice, shape, "use moe/compute=native")
        if config.emulate == "true" or (config.emulate == "auto" and not hardware.is_cuda):
            return all_reasons(experts, why_not_compiled(choice, config.compiled, hardware))
        instead = "use moe/compute=bf16, or moe.compute.emulate=true, which is slower"
        if not hardware.is_cuda:
            choice += " with moe.compute.emulate=false"
            instead = "use moe.compute.emulate=auto for the exact emulation"
        return all_reasons(experts, why_no_kernels(choice, hardware, cls.capability, instead))

    def multiply(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        return self.experts(x_RD.to(product_dtype(x_RD)), offsets_L, weights, source)

    def on_weights_updated(self) -> None:
        self.experts.on_weights_updated()
