"""The weights that a sharded model computes with, whole, one layer at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from afmoe.checkpoint.layouts import layer_of, layers_of
from afmoe.checkpoint.pretrained import ModelTensors
from afmoe.model import AfmoeForCausalLM
from afmoe.parallel.expert_parallel import is_shared


class GatheredTensors(ModelTensors):
    """For rank 0 to read; the other ranks meanwhile `take_part`."""

    def __init__(self, strategy: Any, model: AfmoeForCausalLM) -> None:
        """`strategy`: the `AfmoeDeepSpeedStrategy`."""
        super().__init__(model)
        self.parameters = dict(model.named_parameters())
        self.expert_ranks = strategy.expert_ranks
        self.is_cut = strategy.stage == 3

    @property
    def specs(self) -> dict[str, Tensor]:
        return {
            key: torch.empty(self._shape(key), dtype=t.dtype, device="meta") for key, t in self.state.items()
        }

    def read(self, layer: int | None) -> dict[str, Tensor]:
        return {key: self._whole(key) for key in self.state if layer_of(key) == layer}

    def take_part(self) -> None:
        """Give this rank's parts while rank 0 reads, in the order of `write_model`."""
        for layer in (None, *layers_of(self.state)):
            self.read(layer)

    def _shape(self, key: str) -> tuple[int, ...]:
        parameter: Any = self.parameters.get(key)
        if parameter is None:
            return tuple(self.state[key].shape)
        shape = tuple(parameter.ds_shape if self.is_cut else parameter.shape)
        return (shape[0] * self.expert_ranks.ep_size, *shape[1:]) if is_shared(parameter) else shape

    def _whole(self, key: str) -> Tensor:
        parameter = self.parameters.get(key)
        if parameter is None:
            return self.state[key]
        if self.is_cut:
            return _gathered(parameter)
        return self.expert_ranks.gather(parameter.detach()) if is_shared(parameter) else parameter.detach()


def _gathered(parameter: nn.Parameter) -> Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
