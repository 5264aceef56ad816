"""The optimizer's groups as the run defines them, and as ZeRO can take them: one dtype a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class CanonicalGroup:
    name: str
    parameter_names: list[str]
    """Relative to the model."""
    numbers: list[int]
    """Of its parameters in a torch optimizer's state dict."""
    position: int
    """Of a group among the optimizer's that has its settings."""


class CanonicalGroups:
    """Remembers an optimizer's groups, which are the same for every number of ranks, and splits them by
    dtype.

    ZeRO makes one flat tensor a group, and takes its working dtype from the first group. With stage 1 that is
    the parameters' usual one, since gradients are then kept in fp32 beside them; with stage 2 it is the
    widest, since gradients pass through a buffer of that dtype.
    """

    def __init__(self, optimizer: Optimizer, stage: int) -> None:
        split = []
        for index, group in enumerate(optimizer.param_groups):
            for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"]):
                split.append((index, dtype, _of_dtype(group, dtype)))
        self.is_split = len(split) > len(optimizer.param_groups)
        names = [(group["name"], group["parameter_names"]) for group in optimizer.param_groups]
        if self.is_split:
            is_wide_first = stage == 2
            split.sort(key=lambda one: (one[1] == torch.float32) != is_wide_first)
            optimizer.param_groups[:] = [group for _, _, group in split]
        sources = [index for index, _, _ in split]
        self.sources = sources
        """Canonical group of each of the optimizer's."""
        self.canonical: list[CanonicalGroup] = []
        count = 0
        for index, (name, group_names) in enumerate(names):
            numbers = list(range(count, count + len(group_names)))
            count += len(group_names)
            self.canonical.append(CanonicalGroup(name, group_names, numbers, sources.index(index)))

    def schedule(self, schedule: LambdaLR) -> LambdaLR:
        """A schedule made for the groups before they were split, for them after."""
        return _SplitSchedule(schedule, self) if self.is_split else schedule


class _SplitSchedule(LambdaLR):
    """Its state dict is that of the schedule without a split."""

    def __init__(self, schedule: LambdaLR, groups: CanonicalGroups) -> None:
        self._groups = groups
        super().__init__(schedule.optimizer, [schedule.lr_lambdas[index] for index in groups.sources])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["_groups"]
        positions = [group.position for group in self._groups.canonical]
        return {
            key: [value[position] for position in positions] if isinstance(value, list) else value
            for key, value in state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(
            {
                key: [value[source] for source in self._groups.sources] if isinstance(value, list) else value
                for key, value in state_dict.items()
            }
        )


def _of_dtype(group: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A group of the same settings with the parameters of one dtype."""
    chosen = [
        (parameter, name)
        for parameter, name in zip(group["params"], group["parameter_names"], strict=True)
        if parameter.dtype == dtype
    ]
    if len(chosen) == len(group["params"]):
        return group
    return group | {
        "name": f"{group['name']}_{str(dtype).removeprefix('torch.')}",
        "params": [parameter for parameter, _ in chosen],
        "parameter_names": [name for _, name in chosen],
    }
