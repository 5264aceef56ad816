"""A sharded run's state as a single process would have it, and back.

Weights and optimizer states come out as deferred tensors: the ranks bring each together when a checkpoint is
written, so none ever holds more than one whole. What comes out is what Lightning's own strategies give for
one process, so a checkpoint knows nothing of ranks, ZeRO or experts' places. The fp32 weight behind a bf16
one is a state of the optimizer, as in `MasterWeights`. What goes in may be mapped from a file: each rank
looks only at its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afmoe.checkpoint.deferred import DeferredTensor
from afmoe.errors import ConfigError
from afmoe.optim.groups import refuse_other_names
from afmoe.optim.master_weights import MASTER
from afmoe.parallel.expert_parallel import ExpertRanks, is_shared
from afmoe.parallel.optimizer_groups import CanonicalGroups
from afmoe.parallel.partitions import Partitions


class WholeState:
    """Every rank has to make every call, and the tensors that come out, in their order."""

    def __init__(self, module: Any, partitions: Partitions | None, expert_ranks: ExpertRanks | None) -> None:
        """`partitions` None: no optimizer."""
        self.owner: nn.Module = module
        self.partitions = partitions
        self.expert_ranks = expert_ranks
        self.parameters: dict[str, nn.Parameter] = dict(module.model.named_parameters())

    # --- out ---

    def module(self) -> dict[str, Tensor | DeferredTensor]:
        """The LightningModule's state dict."""
        state: dict[str, Tensor | DeferredTensor] = {}
        done: dict[int, Tensor | DeferredTensor] = {}
        for name, tensor in self.owner.state_dict(keep_vars=True).items():
            # tied weights stay one tensor
            if id(tensor) not in done:
                is_parameter = isinstance(tensor, nn.Parameter)
                done[id(tensor)] = self._weight(tensor) if is_parameter else tensor.detach().cpu().clone()
            state[name] = done[id(tensor)]
        return state

    def optimizer(self, groups: CanonicalGroups) -> dict[str, Any]:
        """A torch optimizer's state dict over whole parameters."""
        assert self.partitions is not None
        state: dict[int, dict[str, Any]] = {}
        for group in groups.canonical:
            for number, name in zip(group.numbers, group.parameter_names, strict=True):
                own = self._states(self.partitions, self.parameters[name])
                if own:
                    state[number] = own
        live = self.partitions.optimizer.param_groups
        settings = [
            {
                key: value
                for key, value in live[group.position].items()
                if key not in ("params", "moe", "parameter_names")
            }
            | {"name": group.name, "params": group.numbers, "parameter_names": group.parameter_names}
            for group in groups.canonical
        ]
        return {"state": state, "param_groups": settings}

    def _weight(self, parameter: nn.Parameter) -> DeferredTensor:
        partitions = self.partitions
        if partitions is None:
            return self._deferred(parameter, parameter.shape, parameter.dtype, parameter.detach)
        make = partial(partitions.module_weight, parameter)
        return self._deferred(parameter, partitions.shape(parameter), parameter.dtype, make)

    def _states(self, partitions: Partitions, parameter: nn.Parameter) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for key, is_elementwise in partitions.state_keys(parameter).items():
            if is_elementwise:
                states[key] = self._gathered(partitions, parameter, key)
            else:
                states[key] = partitions.optimizer.state[partitions.flat(parameter)][key].cpu().clone()
        if parameter.dtype != torch.float32:
            states[MASTER] = self._gathered(partitions, parameter, None)
        return states

    def _gathered(self, partitions: Partitions, parameter: nn.Parameter, key: str | None) -> DeferredTensor:
        make = partial(partitions.gather, parameter, key)
        return self._deferred(parameter, partitions.shape(parameter), partitions.dtype(parameter, key), make)

    def _deferred(
        self, parameter: nn.Parameter, shape: torch.Size, dtype: torch.dtype, local: Callable[[], Tensor]
    ) -> DeferredTensor:
        ranks = self.expert_ranks
        if ranks is None or not is_shared(parameter):
            return DeferredTensor(shape, dtype, local)
        return DeferredTensor((shape[0] * ranks.ep_size, *shape[1:]), dtype, lambda: ranks.gather(local()))

    # --- in ---

    @torch.no_grad()
    def load_module(self, state: Mapping[str, Tensor]) -> None:
        """Set weights, the optimizer's fp32 copies of them, and buffers. `ConfigError` for other keys."""
        own = self.owner.state_dict(keep_vars=True)
        if own.keys() != state.keys():
            wrong = sorted(own.keys() ^ state.keys())
            raise ConfigError(f"the checkpoint is of another model: {', '.join(wrong[:10])}")
        for name, tensor in own.items():
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(state[name])
                continue
            value = self._local(tensor, state[name]).to(tensor.device)
            if self.partitions is None:
                tensor.copy_(value)
                continue
            self.partitions.set_module_weight(tensor, value)
            if tensor.requires_grad:
                self.partitions.scatter(tensor, value)

    @torch.no_grad()
    def load_optimizer(self, groups: CanonicalGroups, state: Mapping[str, Any]) -> None:
        """Set the optimizer's states and its groups' settings. `ConfigError` for those of other groups."""
        partitions = self.partitions
        assert partitions is not None
        refuse_other_names([(group.name, group.parameter_names) for group in groups.canonical], state)
        for group in groups.canonical:
            for number, name in zip(group.numbers, group.parameter_names, strict=True):
                parameter = self.parameters[name]
                for key, value in state["state"].get(number, {}).items():
                    if key == MASTER:
                        partitions.scatter(parameter, self._local(parameter, value))
                    elif value.dim():
                        partitions.scatter(parameter, self._local(parameter, value), key)
                    else:
                        partitions.set_scalar(parameter, value, key)
        for source, live in zip(groups.sources, partitions.optimizer.param_groups, strict=True):
            stored = state["param_groups"][source]
            kept = ("params", "parameter_names", "name", "moe")
            live.update({key: value for key, value in stored.items() if key not in kept})

    def _local(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        if self.expert_ranks is None or not is_shared(parameter):
            return whole
        return self.expert_ranks.slice(whole)
