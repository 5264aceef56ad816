"""Weights, gradients and optimizer states as planned are those of real tensors after one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afmoe.model import AfmoeForCausalLM
from afmoe.optim.groups import freeze_parameters, is_hidden_matrix
from afmoe.optim.master_weights import MasterWeights
from afmoe.planning import least_bytes
from afmoe.planning.parameters import parameters
from afmoe.planning.parts import STEP, total
from afmoe.planning.states import state_parts
from afmoe.registry import build, configure
from tests.planning.small_model import config, loss_of, made_for, num_bytes, setup_of

SHAPES: list[dict[str, Any]] = [
    {},
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"num_shared_experts": 0},
    {"num_shared_experts": 2, "num_dense_layers": 2},
    {"num_dense_layers": 0, "num_key_value_heads": 4},
    {"num_dense_layers": 4},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_parameters_are_those_of_the_model(changes: dict[str, Any]) -> None:
    model = config(**changes)
    with torch.device("meta"):
        real = AfmoeForCausalLM(model)
    planned = {one.name: one for one in parameters(setup_of(model))}
    assert {name: one.shape for name, one in planned.items()} == {
        name: tuple(parameter.shape) for name, parameter in real.named_parameters()
    }
    for name, parameter in real.named_parameters():
        assert planned[name].is_hidden_matrix == is_hidden_matrix(name, parameter), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "changes", [{}, {"fp32_router": True, "freeze": ("*.layers.1.*", "model.norm.*")}], ids=str
)
def test_states_are_those_of_one_step(optimizer: str, precision: str, changes: dict[str, Any]) -> None:
    setup = setup_of(config(), precision=precision, optimizer=optimizer, **changes)
    model = made_for(setup)
    plugin = build(configure("optim", {"name": optimizer, "freeze": list(setup.freeze)}))
    freeze_parameters(model, plugin.config)
    stepped = inner = plugin.optimizer(model)
    if precision == "bf16-true":
        stepped = MasterWeights(inner)
    loss_of(model, setup).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    stepped.step()
    states = [value for state in inner.state.values() for value in state.values()]
    copies = [
        copy
        for own, inner_group in zip(stepped.param_groups, inner.param_groups, strict=True)
        for parameter, copy in zip(own["params"], inner_group["params"], strict=True)
        if copy is not parameter
    ]
    planned = state_parts(setup)
    kept = [part for part in planned if part.when != STEP]
    assert total(planned, "weights") - total(planned, "weights", "buffers") == num_bytes(*model.parameters())
    assert total(planned, "gradients") == num_bytes(*gradients)
    assert total(kept, "optimizer") == num_bytes(*states, *copies)
    assert total(kept, "optimizer", "fp32 weights") == num_bytes(*copies)


def test_a_router_kept_out_of_training_has_neither_gradient_nor_state() -> None:
    setup = setup_of(config())
    frozen = setup.but(freeze_router=True)
    router = sum(one.numel for one in parameters(setup) if ".router." in one.name)
    assert router == 3 * 8 * 64
    assert total(state_parts(setup), "gradients") - total(state_parts(frozen), "gradients") == 4 * router


def test_two_expert_ranks_hold_half_of_the_experts_each() -> None:
    setup = setup_of(config(), num_ranks=2, strategy="deepspeed", stage=1)
    model = made_for(setup)
    shards = [parameter.chunk(2)[0] for name, parameter in model.named_parameters() if ".experts." in name]
    planned = state_parts(setup.but(ep_size=2, dispatch="all_to_all"))
    assert total(planned, "weights", "experts") == num_bytes(*shards)
    assert total(planned, "weights", "experts") * 2 == total(state_parts(setup), "weights", "experts")
    # AdamW's averages and fp32 weights: at EP 2 a rank owns its half alone, at EP 1 each steps half of all
    assert total(planned, "optimizer") == total(state_parts(setup), "optimizer")


def test_zero_shares_what_its_stage_says() -> None:
    model = config()
    numel = sum(one.numel for one in parameters(setup_of(model)))
    padding = 4 * 2 * 8

    def bytes_of(stage: int, section: str) -> int:
        planned = state_parts(setup_of(model, num_ranks=8, strategy="deepspeed", stage=stage))
        return sum(part.num_bytes for part in planned if part.section == section and part.when != STEP)

    for stage in (1, 2, 3):
        assert bytes_of(stage, "optimizer") == pytest.approx(12 * numel / 8, abs=12 * padding + 16)
    assert bytes_of(1, "gradients") == 4 * numel
    assert bytes_of(2, "gradients") == pytest.approx(4 * numel / 8, abs=4 * padding)


def test_states_on_the_host_leave_a_gpu_and_nothing_leaves_a_cpu() -> None:
    kept = setup_of(config(), num_ranks=2, strategy="deepspeed", stage=1, device_type="cuda")
    moved = kept.but(offload_optimizer=True)
    on_host = sum(part.num_bytes for part in state_parts(moved) if part.on_host)
    numel = sum(one.numel for one in parameters(kept))
    # averages 8, fp32 weights 4, gradients 4 of half of the numbers
    assert on_host == pytest.approx(16 * numel / 2, rel=0.001)
    assert least_bytes(kept) - least_bytes(moved) == pytest.approx(12 * numel / 2, rel=0.001)
    on_cpu = moved.but(device_type="cpu")
    assert not any(part.on_host for part in state_parts(on_cpu))
    assert least_bytes(on_cpu) == least_bytes(kept)
