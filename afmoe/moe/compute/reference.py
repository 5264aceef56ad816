"""`moe/compute=reference`: a plain loop over the experts, in any dtype; others are judged against it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.grouped_mm import Biases, RowSource
from afmoe.registry import register


@register("moe/compute", "reference")
class ReferenceCompute:
    """Plain torch under autograd. On a GPU it waits for the offsets once a call."""

    description = "reference (a plain loop over experts)"

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
        return None

    # rows are split by the offsets on the host
    @torch.compiler.disable
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
        borders = [0, *offsets_L.tolist(), x_RD.shape[0]]
        *rows, padding_PD = x_RD.split([end - start for start, end in itertools.pairwise(borders)])
        gate_bias_LF, up_bias_LF, down_bias_LD = biases or (None, None, None)
        first = (
            [(up_LFD, up_bias_LF)] if gate_LFD is None else [(gate_LFD, gate_bias_LF), (up_LFD, up_bias_LF)]
        )
        of_expert = zip(*(_linear_layers(*pair) for pair in (*first, (down_LDF, down_bias_LD))), strict=True)
        outputs = []
        for x_ND, (*first_layers, down_layer) in zip(rows, of_expert, strict=True):
            hidden_NF = self.activation.hidden(*(F.linear(x_ND, *layer) for layer in first_layers))
            outputs.append(F.linear(hidden_NF, *down_layer))
        return torch.cat([*outputs, torch.zeros_like(padding_PD, dtype=outputs[0].dtype)])

    def on_weights_updated(self) -> None:
        """Nothing is derived from the weights."""


def _linear_layers(
    weight_LNK: Tensor, bias_LN: Tensor | None
) -> list[tuple[Tensor, Tensor]] | list[tuple[Tensor]]:
    """Each expert's weight and, where there is one, bias."""
    # unbind: indexing `weight[e]` would make backward add one whole [L, out, in] tensor per expert
    weights = weight_LNK.unbind(0)
    return list(zip(weights)) if bias_LN is None else list(zip(weights, bias_LN.unbind(0), strict=True))
