"""Activations by the name that a config's `hidden_act` holds, of experts and dense layers alike.

`hidden` is what lies between the two products of an MLP; `hidden_backward` is its derivative without an
autograd graph, because the experts compute it again in backward, inside one autograd node. The common
activations have a derivative of their own; any other name is looked up in transformers and differentiated by
autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.errors import ConfigError, closest

CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative."""

    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, input) -> gradient of the input."""
    limit: float | None = None
    """Bound of gate (from above) and up (from both sides) before they meet."""

    @property
    def has_derivative(self) -> bool:
        """Whether `backward` is a function of its own, and not autograd's."""
        return self.name in _ACTIVATIONS or self.limit is not None

    @property
    def needs_gate(self) -> bool:
        return self.limit is not None

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def hidden(self, *products: Tensor) -> Tensor:
        """activation(gate) * up of `products` (gate, up); activation(up) of (up,) alone."""
        if len(products) == 1:
            return self.forward(*products)
        gate, up = self._clamped(*products)
        return self.forward(gate) * up

    def hidden_backward(self, grad_hidden: Tensor, *products: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`hidden` again, and the gradients of `products`. Overwrites `grad_hidden`."""
        if len(products) == 1:
            return self.forward(*products), [self.backward(grad_hidden, *products)]
        gate, up = self._clamped(*products)
        activated = self.forward(gate)
        hidden = activated * up
        grad_up = activated.mul_(grad_hidden)
        grad_gate = self.backward(grad_hidden.mul_(up), gate)
        if self.limit is not None:
            grad_gate = grad_gate.masked_fill(products[0] > self.limit, 0.0)
            grad_up.masked_fill_(products[1].abs() > self.limit, 0.0)
        return hidden, [grad_gate, grad_up]

    def _clamped(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)

    def __reduce__(self) -> Any:
        # torch's own functions cannot be pickled; the name says it all
        return activation_named, (self.name,)


@cache
def activation_named(name: str) -> Activation:
    """The activation that transformers' `ACT2FN` knows by `name`, or `clamped_swiglu:LIMIT`.

    The latter is silu(min(gate, LIMIT)) * clamp(up, -LIMIT, LIMIT), DeepSeek-V4's `swiglu_limit`. Raises
    `ConfigError` for an unknown name and for an activation with trainable parameters of its own.
    """
    if name in _ACTIVATIONS:
        return Activation(name, *_ACTIVATIONS[name])
    if name.split(":")[0] == CLAMPED_SWIGLU:
        return Activation(name, *_SILU, limit=_limit(name))
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        names = {*ACT2FN, f"{CLAMPED_SWIGLU}:LIMIT"}
        raise ConfigError(f"hidden_act={name} is unknown; choose one of: {closest(name, names)}")
    module = ACT2FN[name]
    if any(True for _ in module.parameters()):
        raise ConfigError(
            f"hidden_act={name} has trainable parameters, which experts do not offer; choose one of: "
            + ", ".join(_ACTIVATIONS)
        )

    def forward(x: Tensor) -> Tensor:
        y = module(x)
        # `linear` hands back its input, which nobody may overwrite
        return y.clone() if y is x else y

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad_x,) = torch.autograd.grad(module(x), x, grad)
        return grad_x

    return Activation(name, forward, backward)


def _limit(name: str) -> float:
    text = name.partition(":")[2]
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0.0 < limit < float("inf"):
        raise ConfigError(f"hidden_act={name} needs a positive limit behind a colon, e.g. {CLAMPED_SWIGLU}:7")
    return limit


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, x, 0)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _relu_squared_backward(grad: Tensor, x: Tensor) -> Tensor:
    return F.relu(x).mul_(grad).mul_(2)


_SILU = (F.silu, torch.ops.aten.silu_backward)
_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "relu": (F.relu, _relu_backward),
    "relu2": (_relu_squared, _relu_squared_backward),
}
