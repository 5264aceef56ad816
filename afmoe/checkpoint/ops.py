"""Invertible steps between our names and shapes and another layout's, on the tensors of one layer.

`forward` goes from canonical to the other layout, `backward` returns. Both take and give `{name within the
layer: tensor}`, change nothing in place and never touch values, so a round trip is bitwise. They work on
meta tensors too: the keys and shapes that a file must have come from running the steps on a model that
holds no data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afmoe.errors import ConfigError

Layer = dict[str, Tensor]


class Op(Protocol):
    def forward(self, layer: Layer) -> Layer: ...
    def backward(self, layer: Layer) -> Layer: ...


@dataclass(frozen=True)
class Rename:
    canonical: str
    other: str

    def forward(self, layer: Layer) -> Layer:
        return {self.other if name == self.canonical else name: tensor for name, tensor in layer.items()}

    def backward(self, layer: Layer) -> Layer:
        return {self.canonical if name == self.other else name: tensor for name, tensor in layer.items()}


@dataclass(frozen=True)
class SplitExperts:
    """`[E, out, in]` to one tensor an expert. `each` holds `{}` where the expert's number goes."""

    stacked: str
    each: str

    def forward(self, layer: Layer) -> Layer:
        result: Layer = {}
        for name, tensor in layer.items():
            if name == self.stacked:
                result |= {self.each.format(expert): weight for expert, weight in enumerate(tensor.unbind(0))}
            else:
                result[name] = tensor
        return result

    def backward(self, layer: Layer) -> Layer:
        pattern = re.compile(re.escape(self.each).replace(r"\{\}", r"(\d+)"))
        weights: dict[int, Tensor] = {}
        result: Layer = {}
        for name, tensor in layer.items():
            if match := pattern.fullmatch(name):
                weights[int(match[1])] = tensor
            else:
                result[name] = tensor
        if weights:
            for expert in range(max(weights) + 1):
                if expert not in weights:
                    raise ConfigError(
                        f"{self.each.format(expert)} is missing: {len(weights)} experts were found"
                    )
            result[self.stacked] = torch.stack([weights[expert] for expert in range(len(weights))])
        return result


@dataclass(frozen=True)
class FuseRows:
    """`[E, out, in]` twice to `[E, 2*out, in]`, `first` on top."""

    first: str
    second: str
    fused: str

    def forward(self, layer: Layer) -> Layer:
        if self.first not in layer:
            return dict(layer)
        result = {name: tensor for name, tensor in layer.items() if name not in (self.first, self.second)}
        result[self.fused] = torch.cat([layer[self.first], layer[self.second]], dim=1)
        return result

    def backward(self, layer: Layer) -> Layer:
        if self.fused not in layer:
            return dict(layer)
        result = {name: tensor for name, tensor in layer.items() if name != self.fused}
        if layer[self.fused].shape[1] % 2:
            raise ConfigError(f"{self.fused} has an odd number of rows: {tuple(layer[self.fused].shape)}")
        result[self.first], result[self.second] = layer[self.fused].chunk(2, dim=1)
        return result


@dataclass(frozen=True)
class SelectionBias:
    """The bias that only selects experts: another name, and fp32 wherever it comes from.

    In bf16 its updates of 1e-3 would round away, so a file that holds it in bf16 (transformers'
    `model.to(bf16)` casts it) is brought back to fp32.
    """

    canonical: str
    other: str
    known: tuple[str, ...]
    """Names that it has in files; a layer must not hold two of them."""

    def forward(self, layer: Layer) -> Layer:
        return self._rename(layer, self.other)

    def backward(self, layer: Layer) -> Layer:
        return self._rename(layer, self.canonical)

    def _rename(self, layer: Layer, target: str) -> Layer:
        found = [name for name in self.known if name in layer]
        if len(found) > 1:
            raise ConfigError(f"one layer holds two selection biases, {found[0]} and {found[1]}: keep one")
        return {
            target if name in found else name: tensor.float() if name in found else tensor
            for name, tensor in layer.items()
        }


@dataclass(frozen=True)
class EmptySharedExpert:
    """No shared expert: transformers keeps its tensors, with a dimension of zero; we have none."""

    gate: str
    up: str
    down: str
    router: str
    """The router's weight `[E, D]`: marks a layer with experts, and gives the empty tensors D and dtype."""

    def forward(self, layer: Layer) -> Layer:
        if self.router not in layer or self.gate in layer:
            return dict(layer)
        weight = layer[self.router]
        hidden_size = weight.shape[1]
        return layer | {
            self.gate: weight.new_empty((0, hidden_size)),
            self.up: weight.new_empty((0, hidden_size)),
            self.down: weight.new_empty((hidden_size, 0)),
        }

    def backward(self, layer: Layer) -> Layer:
        names = (self.gate, self.up, self.down)
        return {name: tensor for name, tensor in layer.items() if name not in names or tensor.numel()}


@dataclass(frozen=True)
class DropRuntimeState:
    """Counters that a trainer keeps beside the weights: never written, dropped when read."""

    pattern: str

    def forward(self, layer: Layer) -> Layer:
        return dict(layer)

    def backward(self, layer: Layer) -> Layer:
        return {name: tensor for name, tensor in layer.items() if not re.fullmatch(self.pattern, name)}
