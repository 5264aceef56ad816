"""fp32 weights behind a model in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MASTER = "master"
"""Key of a parameter's fp32 weight among its states."""


class MasterWeights(torch.optim.Optimizer):
    """Lets an optimizer work on fp32 copies of a model's bf16 parameters, and rounds them back after a step.

    bf16 keeps 8 significant bits: a step of a thousandth of a weight would be rounded away, and AdamW's
    averages would stand still. Here only the model's weights and gradients are bf16. Parameters that are fp32
    already (the router's under `fp32_router`) have no copy. Copies and states are in the state dict, in
    fp32, so a continued run is bitwise the undisturbed one.
    """

    found_inf: Tensor | None = None
    """Handed on to the wrapped optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        """`inner`: fresh, without state, and with no reference to its parameters but in its groups."""
        assert not inner.state, "the optimizer must not have made a step yet"
        self.inner = inner
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        for group in inner.param_groups:
            group["params"] = [
                parameter if parameter.dtype == torch.float32 else parameter.detach().float()
                for parameter in group["params"]
            ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            # a schedule has changed the rate
            inner_group.update(_settings(group))
        for _, parameter, master in self._copied():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.found_inf = self.found_inf  # pyright: ignore[reportAttributeAccessIssue]
        self.inner.step()
        for _, parameter, master in self._copied():
            parameter.copy_(master)
            master.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch's form, with the fp32 weight of each parameter that has one beside its state."""
        state = self.inner.state_dict()
        groups = zip(self.param_groups, state["param_groups"], strict=True)
        return {
            "state": state["state"]
            | {
                index: {**state["state"].get(index, {}), MASTER: master}
                for index, _, master in self._copied()
            },
            "param_groups": [{**_settings(group), "params": packed["params"]} for group, packed in groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {
            index: {key: value for key, value in state.items() if key != MASTER}
            for index, state in state_dict["state"].items()
        }
        self.inner.load_state_dict(
            {
                "state": {index: state for index, state in states.items() if state},
                "param_groups": state_dict["param_groups"],
            }
        )
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_settings(inner_group))
        for index, parameter, master in self._copied():
            master.copy_(state_dict["state"][index][MASTER])
            parameter.copy_(master)

    def _copied(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Number, parameter and fp32 weight of each parameter that has one."""
        index = 0
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            for parameter, master in zip(group["params"], inner_group["params"], strict=True):
                if master is not parameter:
                    yield index, parameter, master
                index += 1


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
