"""The weights of stacked experts, with and without a gate, with and without biases."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Biases = tuple[Tensor | None, Tensor, Tensor]
"""Of the gate projection (None: no gate) [L, F], the up projection [L, F] and the down projection [L, D]."""


class ExpertWeights(NamedTuple):
    """What an expert has of its own. Biases are there for all projections or for none."""

    gate_LFD: Tensor | None
    """None: hidden = activation(x @ up.T), without a gate."""
    up_LFD: Tensor
    down_LDF: Tensor
    gate_bias_LF: Tensor | None = None
    up_bias_LF: Tensor | None = None
    down_bias_LD: Tensor | None = None

    @property
    def first(self) -> list[tuple[Tensor, Tensor | None]]:
        """The projections of x and their biases: gate (where there is one) and up."""
        up = (self.up_LFD, self.up_bias_LF)
        return [up] if self.gate_LFD is None else [(self.gate_LFD, self.gate_bias_LF), up]

    @property
    def num_experts(self) -> int:
        """That every tensor has."""
        return min(tensor.shape[0] for tensor in self if tensor is not None)

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        return self._make(None if weight is None else weight.to(dtype) for weight in self)

    def padded(self, pad_hidden: int, pad_intermediate: int) -> ExpertWeights:
        """With zeros behind D and F."""
        into, back = (0, pad_hidden, 0, pad_intermediate), (0, pad_intermediate, 0, pad_hidden)
        wide, narrow = (0, pad_intermediate), (0, pad_hidden)
        paddings = (into, into, back, wide, wide, narrow)
        return self._make(
            None if weight is None else F.pad(weight, padding)
            for weight, padding in zip(self, paddings, strict=True)
        )
