"""Experts without a gate, with biases, with a clamped activation: who multiplies them, and who says no."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import COUNTS, CPU, Case, build_compute, deviation, make_case
from torch import Tensor

from afmoe.errors import ConfigError, MachineError
from afmoe.layers import FeedForward
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertShape, check_compute
from afmoe.moe.compute.grouped import GroupedExperts
from afmoe.moe.experts import Experts
from afmoe.moe.grouped_mm import ExpertWeights
from afmoe.registry import configure, find

KINDS = [(True, True), (False, False), (False, True)]
each_kind = pytest.mark.parametrize(("gated", "has_bias"), KINDS, ids=["gated-bias", "plain", "plain-bias"])
# measured 3.2e-16, 3.6e-7 and 5.3e-3 (inputs rounded to bf16 as well)
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1.2e-6, torch.bfloat16: 1.6e-2}


def shape(gated: bool, has_bias: bool, activation: str = "silu") -> ExpertShape:
    return ExpertShape(
        num_experts=8,
        hidden_size=64,
        intermediate_size=48,
        activation=activation,
        gated=gated,
        has_bias=has_bias,
    )


def operands(case: Case, gated: bool, has_bias: bool) -> list[Tensor | None]:
    """x, the three projections and the three biases."""
    num_experts, intermediate_size, hidden_size = case.up_LFD.shape
    biases = [torch.randn(num_experts, size) for size in (intermediate_size, intermediate_size, hidden_size)]
    biases = [bias.to(case.x_RD.dtype) if has_bias else None for bias in biases]
    gate_LFD = case.gate_LFD
    if not gated:
        gate_LFD = biases[0] = None
    return [case.x_RD, gate_LFD, case.up_LFD, case.down_LDF, *biases]


def results(compute: Any, case: Case, given: list[Tensor | None]) -> list[Tensor]:
    """y and the gradient of each operand that is there."""
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in given]
    x_RD, gate_LFD, up_LFD, down_LDF, *biases = leaves
    y_RD = compute(
        x_RD, case.offsets_L, gate_LFD, up_LFD, down_LDF, None if biases[1] is None else tuple(biases)
    )
    grads = torch.autograd.grad(y_RD, [leaf for leaf in leaves if leaf is not None], case.grad_y_RD)
    return [y_RD.detach(), *grads]


def compute_named(name: str, case: Case, activation: str = "silu") -> Any:
    if name != "grouped_mm":
        return build_compute(name, case, activation)

    experts = GroupedExperts(activation_named(activation))

    def compute(x_RD: Tensor, offsets_L: Tensor, *weights: Any) -> Tensor:
        *projections, biases = weights
        weights = ExpertWeights(*projections, *(biases or ()))
        return experts.by_grouped_mm(x_RD, offsets_L, weights)

    return compute


@each_kind
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("native", torch.float64),
        ("native", torch.float32),
        ("native", torch.bfloat16),
        ("grouped_mm", torch.float32),
        ("grouped_mm", torch.bfloat16),
        ("bf16", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("sizes", [(64, 48), (30, 33)], ids=str)
def test_outputs_and_all_gradients_equal_the_reference(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], gated: bool, has_bias: bool
) -> None:
    case = make_case(COUNTS[0], num_padding_rows=7, hidden_size=sizes[0], intermediate_size=sizes[1])
    case = case.to(dtype)
    given = operands(case, gated, has_bias)
    exact = case.to(torch.float64)
    expected = results(
        build_compute("reference", exact), exact, [None if t is None else t.double() for t in given]
    )
    actual = results(compute_named(name, case), case, given)
    assert len(actual) == len(expected)
    for value, wanted in zip(actual, expected, strict=True):
        assert value.dtype == dtype
        assert deviation(value, wanted) <= TOLERANCE[dtype]


@each_kind
@pytest.mark.parametrize("name", ["native", "grouped_mm"])
def test_empty_experts_and_padding_rows_get_exactly_zero(name: str, gated: bool, has_bias: bool) -> None:
    case = make_case(COUNTS[0], num_padding_rows=5)
    case.x_RD[case.num_rows :] = float("nan")
    case.grad_y_RD[case.num_rows :] = float("nan")
    y_RD, grad_x_RD, *grads = results(compute_named(name, case), case, operands(case, gated, has_bias))
    assert (y_RD[case.num_rows :] == 0).all()
    assert (grad_x_RD[case.num_rows :] == 0).all()
    for grad_L in grads:
        assert grad_L.isfinite().all()
        for expert, count in enumerate(case.counts):
            assert (grad_L[expert] == 0).all() == (count == 0)


@each_kind
def test_the_reference_is_the_formula_and_passes_gradcheck(gated: bool, has_bias: bool) -> None:
    case = make_case((3, 0, 2), num_padding_rows=1, hidden_size=5, intermediate_size=4).to(torch.float64)
    compute = build_compute("reference", case, "relu2")
    given = [None if t is None else t.requires_grad_() for t in operands(case, gated, has_bias)]
    there = [tensor for tensor in given if tensor is not None]

    def layer(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        x_RD, gate_LFD, up_LFD, down_LDF, *biases = [None if t is None else next(left) for t in given]
        return compute(x_RD, case.offsets_L, gate_LFD, up_LFD, down_LDF, biases if has_bias else None)

    assert torch.autograd.gradcheck(layer, there)
    x_RD, gate_LFD, up_LFD, down_LDF, *biases = given
    gate_b, up_b, down_b = (0.0 if bias is None else bias[2] for bias in biases)
    raised = x_RD[3:5] @ up_LFD[2].t() + up_b
    hidden = raised.relu().square()
    if gated:
        hidden = (x_RD[3:5] @ gate_LFD[2].t() + gate_b).relu().square() * raised
    torch.testing.assert_close(layer(*there)[3:5], hidden @ down_LDF[2].t() + down_b)


@pytest.mark.parametrize("name", ["native", "grouped_mm"])
def test_a_clamped_activation_bounds_gate_and_up_in_every_plugin(name: str) -> None:
    case = make_case((40, 0, 24))
    given = operands(case, True, False)
    expected = results(build_compute("reference", case, "clamped_swiglu:0.5"), case, given)
    actual = results(compute_named(name, case, "clamped_swiglu:0.5"), case, given)
    assert max(map(deviation, actual, expected)) <= TOLERANCE[torch.float32]
    unbounded = results(build_compute("reference", case), case, given)
    assert min(map(deviation, unbounded, expected)) > 0.5


def test_a_dense_layer_and_an_expert_share_their_activation() -> None:
    for activation in ("silu", "relu2", "clamped_swiglu:0.5"):
        dense = FeedForward(16, 8, activation)
        layers = (dense.gate_proj, dense.up_proj, dense.down_proj)
        case = make_case((6,), hidden_size=16, intermediate_size=8)
        weights = [layer.weight[None] for layer in layers]
        y_RD = build_compute("native", case, activation)(case.x_RD, case.offsets_L, *weights)
        torch.testing.assert_close(y_RD, dense(case.x_RD))


@pytest.mark.parametrize(
    ("gated", "has_bias", "names"),
    [
        (True, False, ["gate_proj", "up_proj", "down_proj"]),
        (False, False, ["up_proj", "down_proj"]),
        (
            True,
            True,
            ["gate_proj", "up_proj", "down_proj", "gate_proj_bias", "up_proj_bias", "down_proj_bias"],
        ),
        (False, True, ["up_proj", "down_proj", "up_proj_bias", "down_proj_bias"]),
    ],
)
def test_experts_hold_the_parameters_of_their_kind(gated: bool, has_bias: bool, names: list[str]) -> None:
    case = make_case((4, 0, 3))
    experts = Experts(3, 64, 48, build_compute("native", case), gated=gated, has_bias=has_bias)
    experts.init_weights(0.02)
    parameters = dict(experts.named_parameters())
    assert list(parameters) == names
    for name, parameter in parameters.items():
        assert (parameter == 0).all() == name.endswith("_bias"), name
    y_RD = experts(case.x_RD, case.offsets_L)
    assert y_RD.shape == case.x_RD.shape
    y_RD.sum().backward()
    assert all(parameter.grad is not None for parameter in parameters.values())
    given = [None, None, None] if not has_bias else [parameters.get(f"{p}_proj_bias") for p in PROJECTIONS]
    weights = [parameters.get(f"{p}_proj") for p in PROJECTIONS]
    reference = build_compute("reference", case)
    expected = reference(case.x_RD, case.offsets_L, *weights, tuple(given) if has_bias else None)
    torch.testing.assert_close(y_RD, expected)


PROJECTIONS = ("gate", "up", "down")


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
@pytest.mark.parametrize(
    ("gated", "has_bias", "reason"),
    [
        (False, False, "these have no gate; use moe/compute=native"),
        (True, True, "these have biases; use moe/compute=native"),
        (False, True, "these have no gate and biases; use moe/compute=native"),
    ],
)
def test_plugins_for_gated_experts_refuse_the_others(
    name: str, gated: bool, has_bias: bool, reason: str
) -> None:
    plugin: Any = find("moe/compute", name)
    with pytest.raises(MachineError, match=reason):
        check_compute(plugin, configure("moe/compute", name), hardware=CPU, shape=shape(gated, has_bias))


@each_kind
@pytest.mark.parametrize("name", ["reference", "native", "bf16"])
def test_plugins_that_multiply_every_kind_say_so(name: str, gated: bool, has_bias: bool) -> None:
    plugin: Any = find("moe/compute", name)
    config = configure("moe/compute", name)
    check_compute(plugin, config, hardware=CPU, shape=shape(gated, has_bias))


def test_an_activation_that_needs_a_gate_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="hidden_act=clamped_swiglu:7 needs experts with a gate; use silu"):
        shape(gated=False, has_bias=False, activation="clamped_swiglu:7")
