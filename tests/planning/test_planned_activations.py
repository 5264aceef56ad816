"""What a forward keeps for backward, as planned and as autograd's hooks see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from afmoe.planning import Setup
from afmoe.planning.kept import materialises_scores
from afmoe.planning.memory import activations, weight_casts
from afmoe.planning.parameters import parameters
from tests.planning.small_model import config, loss_of, made_for, setup_of


def saved_bytes(setup: Setup) -> int:
    """Of the storages that autograd saves in a forward, each once, without the parameters."""
    model = made_for(setup)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    # an address that is free again would count twice
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, setup)
    return sum(saved.values())


def planned_bytes(setup: Setup) -> int:
    kept = activations(setup)
    if setup.activation_checkpointing != "none":
        # checkpointing holds these beside the graph
        kept["masks and angles"] = setup.num_tokens if setup.activation_checkpointing == "full" else 0
    return kept.total() + weight_casts(setup, parameters(setup))


# measured: 2e-4 at most; the rest are offsets of experts and single numbers
TOLERANCE = 1e-3


@pytest.mark.parametrize("compute", ["native", "bf16", "fp8", "mxfp8", "reference"])
@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_activations_are_those_that_autograd_saves(compute: str, level: str, precision: str) -> None:
    setup = setup_of(config(), compute=compute, precision=precision, activation_checkpointing=level)
    assert saved_bytes(setup) == pytest.approx(planned_bytes(setup), rel=TOLERANCE)


@pytest.mark.parametrize("compute", ["native", "bf16", "fp8", "reference"])
def test_activations_under_autocast_are_those_that_autograd_saves(compute: str) -> None:
    setup = setup_of(config(), compute=compute, precision="bf16-mixed")
    assert saved_bytes(setup) == pytest.approx(planned_bytes(setup), rel=TOLERANCE)


KINDS: list[dict[str, Any]] = [
    {"score_before_experts": True},
    {"norm_order": "cast_then_scale"},
    {"num_shared_experts": 0},
    {"hidden_act": "clamped_swiglu:7"},
    {"route_norm": False},
    {"num_dense_layers": 0},
    {"num_dense_layers": 4},
    {"num_key_value_heads": 4},
]


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_kind_of_model_keeps_what_is_planned(changes: dict[str, Any], precision: str) -> None:
    setup = setup_of(config(**changes), precision=precision)
    assert saved_bytes(setup) == pytest.approx(planned_bytes(setup), rel=TOLERANCE)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("length", [16, 130, 200])
def test_attention_keeps_what_is_planned_at_every_length(attention: str, length: int) -> None:
    setup = setup_of(config(), length, attention=attention)
    assert saved_bytes(setup) == pytest.approx(planned_bytes(setup), rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_router_in_fp32_keeps_what_is_planned(precision: str) -> None:
    setup = setup_of(config(), precision=precision, fp32_router=True)
    assert saved_bytes(setup) == pytest.approx(planned_bytes(setup), rel=TOLERANCE)


def test_less_is_kept_the_more_is_computed_again() -> None:
    kept = [
        planned_bytes(setup_of(config(), activation_checkpointing=level))
        for level in ("none", "selective", "full")
    ]
    # measured 7.6 MB, 1.4 MB, 0.35 MB
    assert kept[0] > 4 * kept[1] > 12 * kept[2]


def test_fused_attention_on_a_gpu_takes_grouped_keys_or_a_mask_but_not_both() -> None:
    grouped = setup_of(config(), device_type="cuda")
    assert materialises_scores(grouped)
    assert not materialises_scores(grouped.but(model=config(num_key_value_heads=4)))
    assert not materialises_scores(grouped.but(attention="flash"))
    assert not materialises_scores(grouped.but(device_type="cpu"))


def test_rows_grow_with_imbalance_between_expert_ranks_only() -> None:
    alone = setup_of(config(), imbalance=1.5)
    assert activations(alone) == activations(alone.but(imbalance=1.0))
    shared = alone.but(num_ranks=2, ep_size=2, dispatch="all_to_all")
    even = activations(shared.but(imbalance=1.0))
    # rows and their products, but not the answers, which are those of this rank's own tokens
    assert activations(shared)["experts"] == 1.5 * even["experts"]
