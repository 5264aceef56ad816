"""The closed formulas of docs/planning.md, written down as they stand there, are what the program sums."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from afmoe import CONF_DIRECTORY
from afmoe.config import AfmoeConfig
from afmoe.planning import Setup
from afmoe.planning.kept import ends_bytes, layer_bytes, rotary_bytes
from afmoe.planning.memory import activations
from afmoe.planning.parameters import parameters
from afmoe.planning.parts import total
from afmoe.planning.states import state_parts

NAMES = ("trinity_nano", "trinity_mini", "trinity_large")


def setup_of(name: str, **changes: object) -> Setup:
    section = OmegaConf.to_container(OmegaConf.load(CONF_DIRECTORY / "model" / f"{name}.yaml"))
    assert isinstance(section, dict)
    del section["pretrained"], section["revision"]
    model = AfmoeConfig(**{str(key): value for key, value in section.items()})
    base = Setup(model=model, batch_size=2, sequence_length=4096, attention="flash", precision="bf16-true")
    return base.but(**changes)


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name: str) -> None:
    c = setup_of(name).model
    D, F, W, C, E, V = (
        c.hidden_size,
        c.moe_intermediate_size,
        c.intermediate_size,
        c.head_dim,
        c.num_experts,
        c.vocab_size,
    )
    H, G = c.num_attention_heads, c.num_key_value_heads or 0
    layers, dense_layers = c.num_hidden_layers, c.num_dense_layers
    moe_layers = layers - dense_layers
    experts = moe_layers * 3 * E * D * F
    dense = 2 * V * D + D + layers * (D * C * (3 * H + 2 * G) + 2 * C + 4 * D)
    dense += dense_layers * 3 * D * W + moe_layers * (E * D + 3 * D * F)
    listed = parameters(setup_of(name))
    assert sum(one.numel for one in listed if one.is_expert) == experts
    assert sum(one.numel for one in listed if not one.is_expert) == dense
    # with one rank for each expert, what only a larger S would lower
    S = E
    shared = setup_of(name, num_ranks=1024, ep_size=S, strategy="deepspeed", stage=2, dispatch="all_to_all")
    planned = state_parts(shared)
    weights = total(planned, "weights") - total(planned, "weights", "buffers")
    assert weights == 2 * (dense + experts // S)
    states = total(planned, "optimizer", "fp32 weights") + total(planned, "optimizer", "AdamW averages")
    assert states == pytest.approx(12 * (dense + experts) / 1024, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ep_size", [1, 8])
def test_activations(name: str, ep_size: int) -> None:
    setup = setup_of(name)
    if ep_size > 1:
        setup = setup.but(num_ranks=8, ep_size=8, strategy="deepspeed", stage=1, dispatch="all_to_all")
    c, h, p = setup.model, 2, 2
    D, F, W, C, E = c.hidden_size, c.moe_intermediate_size, c.intermediate_size, c.head_dim, c.num_experts
    H, G, K = c.num_attention_heads, c.num_key_value_heads or 0, c.num_experts_per_tok
    T = 2 * 4096
    R = N = T * K
    kept = layer_bytes(setup, c.num_hidden_layers - 1)
    attention = h * D + 8 * (H + G) * C + 4 * (H + G) + 2 * p * (H + G) * C + 4 * H + 2 * p * H * C
    router = T * (h * D + 4 * E + 4) + 12 * N
    dispatch = p * N * D + 28 * N + T + (16 * R if ep_size > 1 else 0)
    assert kept["norms"] == 4 * T * (8 * D + 4)
    assert kept["attention"] == T * (attention + p * H * C)
    assert kept["router"] == router
    assert kept["shared expert"] == 4 * p * T * F
    assert kept["dispatch"] == dispatch
    assert kept["experts"] == 2 * p * R * F + (p * R * D if ep_size > 1 else 0)
    assert layer_bytes(setup, 0)["dense"] == T * (h * D + 4 * p * W)
    assert ends_bytes(setup) == T * (8 * D + 4 + h * D + 16)
    assert rotary_bytes(setup) == h * C * T
    full = activations(setup.but(activation_checkpointing="full"))
    assert full["layers' inputs"] == c.num_hidden_layers * h * T * D
    selective = activations(setup.but(activation_checkpointing="selective"))
    moe_layers = c.num_hidden_layers - c.num_dense_layers
    assert selective["router"] == moe_layers * router
    assert selective["dispatch"] == moe_layers * (dispatch + h * R * D)
    assert selective["dense"] == c.num_dense_layers * h * T * D
    assert selective["norms"] == c.num_hidden_layers * p * T * D
