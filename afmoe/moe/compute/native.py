"""`moe/compute=native`: grouped products of torch in the dtype handed over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.grouped_mm import Biases, RowSource, expert_mlp
from afmoe.registry import register


@register("moe/compute", "native")
class NativeCompute:
    """On a CPU one product per expert, in any dtype; on a GPU `torch.nn.functional.grouped_mm`.

    In fp32, and on GPUs other than sm_90 and sm_100, torch waits for the offsets in each grouped product.
    """

    description = "native (grouped products in the model's dtype)"

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
        gated: bool = True,
        has_bias: bool = False,
    ) -> str | None:
        if hardware.capability is not None and hardware.capability < (8, 0):
            return (
                "moe/compute=native needs a GPU of sm_80 or newer for torch's grouped products, this one is "
                f"{hardware.architecture}; use moe/compute=reference"
            )
        return None

    def __call__(
        self,
        x_RD: Tensor,
        offsets_L: Tensor,
        gate_LFD: Tensor | None,
        up_LFD: Tensor,
        down_LDF: Tensor,
        biases: Biases | None = None,
        source: RowSource | None = None,
    ) -> Tensor:
        return expert_mlp(x_RD, offsets_L, gate_LFD, up_LFD, down_LDF, self.activation, biases, source)

    def on_weights_updated(self) -> None:
        """Nothing is derived from the weights."""
