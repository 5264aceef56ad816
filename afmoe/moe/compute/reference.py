"""`moe/compute=reference`: a plain loop over the experts, in any dtype; others are judged against it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
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
    ) -> str | None:
        return None

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor
    ) -> Tensor:
        borders = [0, *offsets_L.tolist(), x_RD.shape[0]]
        *rows, padding_PD = x_RD.split([end - start for start, end in itertools.pairwise(borders)])
        # unbind: indexing `weight[e]` would make backward add one whole [L, out, in] tensor per expert
        weights = zip(gate_LFD.unbind(0), up_LFD.unbind(0), down_LDF.unbind(0), strict=True)
        outputs = []
        for x_ND, (gate_FD, up_FD, down_DF) in zip(rows, weights, strict=True):
            hidden_NF = self.activation(F.linear(x_ND, gate_FD)) * F.linear(x_ND, up_FD)
            outputs.append(F.linear(hidden_NF, down_DF))
        return torch.cat([*outputs, torch.zeros_like(padding_PD, dtype=outputs[0].dtype)])

    def on_weights_updated(self) -> None:
        """Nothing is derived from the weights."""
