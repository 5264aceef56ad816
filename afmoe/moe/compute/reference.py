"""`moe/compute=reference`: a plain loop over the experts, in any dtype; others are judged against it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertCompute, ExpertShape
from afmoe.moe.grouped_mm import ExpertWeights, RowSource
from afmoe.registry import register


@register("moe/compute", "reference")
class ReferenceCompute(ExpertCompute):
    """Plain torch under autograd: no operator, so `torch.compile` breaks its graph here.

    On a GPU it waits for the offsets once a call.
    """

    leaves_graph = True
    description = "reference (a plain loop over experts)"

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        self.activation = activation_named(shape.activation)

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, shape: ExpertShape) -> str | None:
        return None

    # rows are split by the offsets on the host
    @torch.compiler.disable
    def multiply(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        borders = [0, *offsets_L.tolist(), x_RD.shape[0]]
        *rows, padding_PD = x_RD.split([end - start for start, end in itertools.pairwise(borders)])
        projections = (*weights.first, (weights.down_LDF, weights.down_bias_LD))
        of_expert = zip(*(_linear_layers(*projection) for projection in projections), strict=True)
        outputs = []
        for x_ND, (*first_layers, down_layer) in zip(rows, of_expert, strict=True):
            hidden_NF = self.activation.hidden(*(F.linear(x_ND, *layer) for layer in first_layers))
            outputs.append(F.linear(hidden_NF, *down_layer))
        return torch.cat([*outputs, torch.zeros_like(padding_PD, dtype=outputs[0].dtype)])


def _linear_layers(
    weight_LNK: Tensor, bias_LN: Tensor | None
) -> list[tuple[Tensor, Tensor]] | list[tuple[Tensor]]:
    """Each expert's weight and, where there is one, bias."""
    # unbind: indexing `weight[e]` would make backward add one whole [L, out, in] tensor per expert
    weights = weight_LNK.unbind(0)
    return list(zip(weights)) if bias_LN is None else list(zip(weights, bias_LN.unbind(0), strict=True))
