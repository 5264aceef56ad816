from __future__ import annotations

import pickle

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


NAMES = ["silu", "gelu", "relu2", "linear", "mish"]


@pytest.mark.parametrize(
    ("name", "gated"),
    [("clamped_swiglu:0.7", True), *((name, gated) for name in NAMES for gated in (True, False))],
)
def test_hidden_rows_and_their_derivative_agree_with_autograd(name: str, gated: bool) -> None:
    activation = activation_named(name)
    products = [torch.randn(64, dtype=torch.float64, requires_grad=True) for _ in range(2 if gated else 1)]
    before = [product.detach().clone() for product in products]
    grad = torch.randn(64, dtype=torch.float64)
    expected = activation.hidden(*products)
    expected_grads = torch.autograd.grad(expected, products, grad)
    hidden, grads = activation.hidden_backward(grad.clone(), *(product.detach() for product in products))
    torch.testing.assert_close(hidden, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(tuple(grads), expected_grads, rtol=1e-12, atol=1e-14)
    # what is saved for backward is read only
    assert all(torch.equal(product, kept) for product, kept in zip(products, before, strict=True))


def test_the_clamped_activation_is_that_of_deepseek_v4() -> None:
    gate, up = torch.randn(2, 256).mul_(20)
    expected = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    activation = activation_named("clamped_swiglu:10")
    assert torch.equal(activation.hidden(gate, up), expected)
    assert activation.limit == 10.0
    assert pickle.loads(pickle.dumps(activation)) is activation


@pytest.mark.parametrize(
    "name", ["clamped_swiglu", "clamped_swiglu:", "clamped_swiglu:-1", "clamped_swiglu:nan"]
)
def test_a_clamped_activation_without_a_limit_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="needs a positive limit behind a colon"):
        activation_named(name)
