"""Which parameters are trained, in which group, at which rate."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from trained_model import draw_gradients, small_model, snapshot

from afmoe.errors import ConfigError
from afmoe.model import iter_moe_blocks
from afmoe.module import AfmoeModule
from afmoe.moe.compute import ExpertShape
from afmoe.moe.experts import Experts
from afmoe.optim.groups import check_patterns, is_hidden_matrix, refuse_other_groups
from afmoe.registry import build, configure
from callbacks.freeze_router import FreezeRouter


def optimizer_of(model: torch.nn.Module, name: str = "adamw", **options: Any) -> torch.optim.Optimizer:
    return build(configure("optim", {"name": name, **options})).optimizer(model)


def module_of(model: Any, **options: Any) -> AfmoeModule:
    return AfmoeModule(
        model,
        optim=build(configure("optim", {"name": "adamw", **options})),
        scheduler=build(configure("scheduler", "wsd")),
        seed=0,
    )


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_groups_hold_every_parameter_once_in_a_fixed_order(name: str) -> None:
    model = small_model()
    groups = optimizer_of(model, name, weight_decay=0.1).param_groups
    assert [(group["name"], group["experts"], group["weight_decay"]) for group in groups] == [
        ("dense_decay", False, 0.1),
        ("dense_no_decay", False, 0.0),
        ("experts_decay", True, 0.1),
    ]
    names = [one for group in groups for one in group["parameter_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    parameters = dict(model.named_parameters())
    for group in groups:
        pairs = zip(group["parameter_names"], group["params"], strict=True)
        assert all(parameters[one] is held for one, held in pairs)
        is_expert = {".experts." in one for one in group["parameter_names"]}
        assert is_expert == {group["experts"]}
    no_decay = {re.sub(r"\d+", "N", one) for one in groups[1]["parameter_names"]}
    assert no_decay == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.N.mlp.router.gate.weight",
        *(f"model.layers.N.self_attn.{one}_norm.weight" for one in "qk"),
        *(
            f"model.layers.N.{one}_layernorm.weight"
            for one in ("input", "post_attention", "pre_mlp", "post_mlp")
        ),
    }


def test_biases_of_experts_are_no_matrices_although_they_have_rank_2() -> None:
    compute: Any = build(
        configure("moe/compute", "native"),
        shape=ExpertShape(
            num_experts=4, hidden_size=8, intermediate_size=6, activation="silu", has_bias=True
        ),
    )
    experts = Experts(4, 8, 6, compute, has_bias=True)
    ranks = {name: parameter.ndim for name, parameter in experts.named_parameters()}
    assert ranks["up_proj_bias"] == 2
    found = {name for name, parameter in experts.named_parameters() if is_hidden_matrix(name, parameter)}
    assert found == {"gate_proj", "up_proj", "down_proj"}


def test_rates_make_groups_of_their_own_and_the_first_match_counts() -> None:
    options = {"lr": 0.5, "rates": {"*.router.*": 0.1, "model.layers.2.*": 2.0, "*.experts.*": 0.1, "*": 1}}
    groups = {group["name"]: group for group in optimizer_of(small_model(), **options).param_groups}
    assert list(groups) == [
        "dense_decay",
        "dense_decay_x2.0",
        "dense_no_decay",
        "dense_no_decay_x0.1",
        "dense_no_decay_x2.0",
        "experts_decay_x0.1",
        "experts_decay_x2.0",
    ]
    assert [group["lr"] for group in groups.values()] == [0.5, 1.0, 0.5, 0.05, 1.0, 0.05, 1.0]
    # the router of layer 2 matches two patterns
    assert groups["dense_no_decay_x0.1"]["parameter_names"] == [
        f"model.layers.{layer}.mlp.router.gate.weight" for layer in (1, 2)
    ]
    assert groups["experts_decay_x0.1"]["parameter_names"] == [
        f"model.layers.1.mlp.experts.{one}_proj" for one in ("gate", "up", "down")
    ]


def test_schedule_keeps_the_factors() -> None:
    optimizer = optimizer_of(small_model(), lr=0.5, rates={"*.router.*": 0.1})
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, build(configure("scheduler", {"name": "linear", "warmup_steps": 0})).factor(10)
    )
    for _ in range(5):
        optimizer.step()
        schedule.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["dense_no_decay"] == pytest.approx(0.25)
    assert rates["dense_no_decay_x0.1"] == pytest.approx(0.025)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_stay_and_the_rest_moves(name: str) -> None:
    model = small_model()
    module = module_of(model, freeze=["*.experts.*", "model.layers.0.*"])
    before = snapshot(model)
    optimizer = optimizer_of(module.model, name, lr=1e-2)
    draw_gradients(model)
    optimizer.step()
    for parameter_name, parameter in model.named_parameters():
        is_frozen = ".experts." in parameter_name or parameter_name.startswith("model.layers.0.")
        assert torch.equal(parameter, before[parameter_name]) == is_frozen, parameter_name
        assert parameter.requires_grad != is_frozen


@pytest.mark.parametrize(
    "compute",
    [
        "native",
        "reference",
        "bf16",
        {"name": "fp8", "emulate": True},
        {"name": "mxfp8", "emulate": True},
    ],
    ids=str,
)
def test_every_compute_trains_around_frozen_experts(compute: Any) -> None:
    model = small_model()
    other = type(model)(model.config, compute=configure("moe/compute", compute))
    other.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (2, 16))
    gradients = []
    for freeze in ([], ["*.experts.up_proj"], ["*.experts.*"]):
        module_of(other, freeze=freeze)
        other.zero_grad()
        loss = other(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        assert all((one.grad is None) != one.requires_grad for one in other.parameters())
        embedding = other.model.embed_tokens.weight.grad
        assert embedding is not None
        gradients.append(embedding.clone())
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("key", ["freeze", "rates"])
def test_pattern_of_no_parameter_is_refused_with_the_closest_names(key: str) -> None:
    pattern = "*.routers.gate.weight"
    options = configure("optim", {"name": "adamw", key: [pattern] if key == "freeze" else {pattern: 0.5}})
    with pytest.raises(ConfigError, match=rf"optim.{key}: .*routers.* the closest: ") as error:
        check_patterns((name for name, _ in small_model().named_parameters()), options)
    assert "model.layers.*.mlp.router.gate.weight" in str(error.value)


def test_rates_without_effect_are_refused() -> None:
    names = [name for name, _ in small_model().named_parameters()]

    def refusal(*also_frozen: str, **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            check_patterns(names, configure("optim", {"name": "adamw", **options}), also_frozen)
        return str(error.value)

    rates = {"*.router.*": 0.1}
    frozen = "optim.rates: every parameter called *.router.* is frozen"
    assert frozen in refusal(freeze=["*.mlp.*"], rates=rates)
    # by callbacks=freeze_router
    assert frozen in refusal(FreezeRouter.frozen, rates=rates)
    shadowed = {"*.mlp.*": 0.5, "*.router.*": 0.1}
    assert "*.router.* never counts" in refusal(rates=shadowed)
    assert "every one is frozen" in refusal(freeze=["*"])
    # what is trained in part keeps its rate
    options = {"name": "adamw", "freeze": ["model.layers.1.*"], "rates": dict(reversed(shadowed.items()))}
    check_patterns(names, configure("optim", options))


def test_the_pattern_of_freeze_router_names_what_it_freezes() -> None:
    model = small_model()
    for block in iter_moe_blocks(model):
        FreezeRouter(FreezeRouter.Config()).prepare(block)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != fnmatchcase(name, FreezeRouter.frozen), name


def test_factor_of_zero_and_a_text_are_refused() -> None:
    for rates in ({"*.router.*": 0}, {"*.router.*": "fast"}, {"*": True}):
        with pytest.raises(ConfigError, match=r"optim.rates: the factor of .* must be a positive number"):
            configure("optim", {"name": "adamw", "rates": rates})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "option", ["adamw.lr", "adamw.weight_decay", "adamw.gradient_clip", "adamw.eps", "muon.adamw_lr"]
)
def test_what_is_no_finite_number_is_refused(option: str, value: float) -> None:
    name, _, key = option.partition(".")
    with pytest.raises(ConfigError, match=rf"optim.{key} must be .*finite.*, got {value}"):
        configure("optim", {"name": name, key: value})


def test_all_frozen_is_refused() -> None:
    with pytest.raises(ConfigError, match="every one is frozen"):
        module_of(small_model(), freeze=["*"])
    model = small_model().requires_grad_(False)
    with pytest.raises(ConfigError, match="every one is frozen"):
        optimizer_of(model)


def test_state_of_other_groups_is_refused() -> None:
    optimizer = optimizer_of(small_model())
    optimizer.register_load_state_dict_pre_hook(refuse_other_groups)
    optimizer.load_state_dict(optimizer.state_dict())
    other = optimizer_of(small_model(), rates={"*.router.*": 0.1}).state_dict()
    with pytest.raises(ConfigError, match=r"dense_no_decay_x0.1 \(2 parameters\)"):
        optimizer.load_state_dict(other)
    # the two groups of older checkpoints
    old = torch.optim.AdamW([{"params": list(small_model().parameters()), "name": "decay"}]).state_dict()
    with pytest.raises(ConfigError, match="older version"):
        optimizer.load_state_dict(old)
