"""Initial weights, what stays fp32, and sizes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from parity import SMALL, our_model, random_ids

from afmoe import AfmoeConfig, AfmoeForCausalLM, iter_moe_blocks
from afmoe.moe.statistics import count_routing

# the sizes of conf/model/afmoe_mini.yaml
MINI = {
    "vocab_size": 267,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "sliding_window": 64,
    "mup_enabled": True,
}


def test_fresh_weights_have_the_configured_spread():
    model = AfmoeForCausalLM(AfmoeConfig(**MINI, initializer_range=0.03))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            # the smallest matrix has 1,024 entries: its standard deviation is known to 2.2 %, four times that
            assert abs(parameter.std().item() / 0.03 - 1) < 0.09, name
    for block in iter_moe_blocks(model):
        assert bool((block.router.selection_bias == 0).all())


def test_zero_router_init_is_transformers_choice():
    model = AfmoeForCausalLM(AfmoeConfig(**MINI, router_init="zero"))
    for block in iter_moe_blocks(model):
        assert bool((block.router.gate.weight == 0).all())


def test_step_0_leaves_no_expert_without_a_token():
    model = AfmoeForCausalLM(AfmoeConfig(**MINI))
    ids = random_ids(8, 256, vocab_size=MINI["vocab_size"])
    with count_routing(model), torch.no_grad():
        model(ids)
    for block in iter_moe_blocks(model):
        # measured over this seed: the least loaded of the 8 experts has 174 of 4,096 copies
        assert int(block.statistics.counts_E.min()) > 0
    # with transformers' zero gate every token goes to the same two
    zero = AfmoeForCausalLM(AfmoeConfig(**MINI, router_init="zero"))
    with count_routing(zero), torch.no_grad():
        zero(ids)
    for block in iter_moe_blocks(zero):
        assert int((block.statistics.counts_E == 0).sum()) == 6


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "double"])
def test_the_selection_bias_stays_fp32_and_nothing_else_does(cast: str):
    model = our_model()
    before = [block.router.selection_bias.clone() for block in iter_moe_blocks(model)]
    model = model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
    dtype = {"half": torch.half, "double": torch.double}.get(cast, torch.bfloat16)
    for block, bias in zip(iter_moe_blocks(model), before, strict=True):
        assert block.router.selection_bias.dtype == torch.float32
        assert torch.equal(block.router.selection_bias, bias)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert "model.layers.1.mlp.router.selection_bias" in model.state_dict()


def test_an_update_smaller_than_bf16_resolves_survives_in_the_bias():
    model = our_model().bfloat16()
    bias = next(iter_moe_blocks(model)).router.selection_bias
    bias.fill_(0.5)
    for _ in range(100):
        bias += 1e-3
    assert torch.allclose(bias, torch.full_like(bias, 0.6), atol=1e-4)


def test_an_fp32_router_keeps_its_gate_in_fp32_too():
    model = our_model()
    for block in iter_moe_blocks(model):
        block.router.fp32 = True
    gate = next(iter_moe_blocks(model)).router.gate.weight
    expected = gate.detach().clone()
    model.bfloat16()
    gates = [block.router.gate.weight for block in iter_moe_blocks(model)]
    assert {weight.dtype for weight in gates} == {torch.float32}
    assert torch.equal(gates[0], expected)
    others = {parameter.dtype for name, parameter in model.named_parameters() if "router" not in name}
    assert others == {torch.bfloat16}
    assert model(random_ids(1, 8), output_router_logits=True).router_logits[0].dtype == torch.float32


def test_an_fp32_router_multiplies_in_fp32_under_autocast():
    block = next(iter_moe_blocks(our_model()))
    tokens = torch.randn(20, SMALL["hidden_size"])
    expected = block.router(tokens).logits_TE
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(block.router(tokens).logits_TE, expected)
        block.router.fp32 = True
        assert torch.equal(block.router(tokens).logits_TE, expected)


def test_a_model_on_the_meta_device_can_be_filled_later():
    with torch.device("meta"):
        model = AfmoeForCausalLM(AfmoeConfig(**SMALL, tie_word_embeddings=True))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    source = our_model(tie_word_embeddings=True)
    model.load_state_dict(source.state_dict())
    ids = random_ids(1, 9)
    assert torch.equal(model.eval()(ids).logits, source(ids).logits)


@pytest.mark.parametrize("is_tied", [False, True])
@torch.no_grad()
def test_drawing_fills_every_weight_and_buffer_once_room_was_made(is_tied: bool):
    fields: dict[str, Any] = {"tie_word_embeddings": is_tied, "attention_bias": True, "pad_token_id": 3}
    with torch.device("meta"):
        model = AfmoeForCausalLM(AfmoeConfig(**SMALL, **fields))
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(0)
    model.init_weights()
    assert [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()] == []
    assert not model.model.embed_tokens.weight[3].any()
    for block in iter_moe_blocks(model):
        assert block.router.selection_bias.dtype == torch.float32
        assert not block.router.selection_bias.any()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(0)
    model.init_weights()
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_computes_the_same(how: str):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model = our_model(tie_word_embeddings=True, score_func="softmax", rope_parameters=rope)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    ids = random_ids(1, 9)
    assert torch.equal(copied(ids).logits, model(ids).logits)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


# sizes of the Trinity models by their cards, in billions: total and active, embedding and head included
@pytest.mark.parametrize(
    ("fields", "total", "active"),
    [
        (
            {"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 256}
            | {"num_hidden_layers": 56, "num_attention_heads": 8, "num_key_value_heads": 2},
            6.120,
            1.024,
        ),
        (
            {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024}
            | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4},
            26.124,
            3.475,
        ),
        (
            {"hidden_size": 3072, "intermediate_size": 12288, "moe_intermediate_size": 3072}
            | {"num_hidden_layers": 60, "num_attention_heads": 48, "num_key_value_heads": 8}
            | {"num_dense_layers": 6, "num_experts": 256, "num_experts_per_tok": 4},
            398.635,
            13.372,
        ),
    ],
    ids=["nano", "mini", "large"],
)
def test_published_sizes_come_out_of_the_meta_device(fields: dict, total: float, active: float):
    with torch.device("meta"):
        common = {
            "num_dense_layers": 2,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
        }
        model = AfmoeForCausalLM(AfmoeConfig(**common | fields))
    assert round(model.num_parameters() / 1e9, 3) == total
    assert round(model.num_parameters(active=True) / 1e9, 3) == active
