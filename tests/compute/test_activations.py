from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from afmoe.errors import ConfigError
from afmoe.moe.activations import activation_named


@pytest.mark.parametrize(
    "name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "mish", "quick_gelu", "sigmoid"]
)
def test_an_activation_and_its_derivative_are_those_of_transformers(name: str) -> None:
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(64, dtype=torch.float64)
    expected = ACT2FN[name](x)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    activation = activation_named(name)
    torch.testing.assert_close(activation(x.detach()), expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation.backward(grad, x.detach()), expected_grad, rtol=1e-12, atol=1e-14)


def test_an_unknown_activation_is_refused_with_the_closest_names() -> None:
    with pytest.raises(ConfigError, match=r"hidden_act=sillu is unknown; choose one of: silu"):
        activation_named("sillu")


def test_an_activation_with_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act=prelu has trainable parameters"):
        activation_named("prelu")
