"""Activations by the name that a config's `hidden_act` holds, with derivatives that need no autograd graph.

The experts recompute their activation in backward, inside one autograd node, so they need the derivative as a
function. The common ones are written here; any other name is looked up in transformers and differentiated by
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


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative."""

    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, input) -> gradient of the input."""

    @property
    def has_derivative(self) -> bool:
        """Whether `backward` is a function of its own, and not autograd's."""
        return self.name in _ACTIVATIONS

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def __reduce__(self) -> Any:
        # torch's own functions cannot be pickled; the name says it all
        return activation_named, (self.name,)


@cache
def activation_named(name: str) -> Activation:
    """The activation that transformers' `ACT2FN` knows by `name`.

    Raises `ConfigError` for an unknown name and for an activation with trainable parameters of its own.
    """
    if name in _ACTIVATIONS:
        return Activation(name, *_ACTIVATIONS[name])
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ConfigError(f"hidden_act={name} is unknown; choose one of: {closest(name, ACT2FN)}")
    module = ACT2FN[name]
    if any(True for _ in module.parameters()):
        raise ConfigError(
            f"hidden_act={name} has trainable parameters, which experts do not offer; choose one of: "
            + ", ".join(_ACTIVATIONS)
        )

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad_x,) = torch.autograd.grad(module(x), x, grad)
        return grad_x

    return Activation(name, module, backward)


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
