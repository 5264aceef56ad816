"""Every layout into every other and back, bitwise; detection and its errors."""

from __future__ import annotations

import itertools

import pytest
import torch

from afmoe.checkpoint.layouts import LAYOUTS, convert, convert_layer, detect_layout
from afmoe.errors import ConfigError

NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN = 12, 8, 4


def canonical_layer(layer: int, *, moe: bool, shared: int = 1, dtype: torch.dtype = torch.float32):
    prefix = f"model.layers.{layer}."
    shapes = {"self_attn.q_proj.weight": (8, HIDDEN), "input_layernorm.weight": (HIDDEN,)}
    if moe:
        shapes |= {
            "mlp.router.gate.weight": (NUM_EXPERTS, HIDDEN),
            "mlp.experts.gate_proj": (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN),
            "mlp.experts.up_proj": (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN),
            "mlp.experts.down_proj": (NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN),
        }
        if shared:
            shapes |= {
                "mlp.shared_expert.gate_proj.weight": (EXPERT_HIDDEN * shared, HIDDEN),
                "mlp.shared_expert.up_proj.weight": (EXPERT_HIDDEN * shared, HIDDEN),
                "mlp.shared_expert.down_proj.weight": (HIDDEN, EXPERT_HIDDEN * shared),
            }
    else:
        shapes |= {
            "mlp.gate_proj.weight": (16, HIDDEN),
            "mlp.up_proj.weight": (16, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, 16),
        }
    state = {prefix + name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    if moe:
        state[prefix + "mlp.router.selection_bias"] = torch.randn(NUM_EXPERTS)
    return state


def canonical_state(shared: int = 1, dtype: torch.dtype = torch.float32):
    return {
        "model.embed_tokens.weight": torch.randn(20, HIDDEN).to(dtype),
        **canonical_layer(0, moe=False, dtype=dtype),
        **canonical_layer(1, moe=True, shared=shared, dtype=dtype),
        **canonical_layer(10, moe=True, shared=shared, dtype=dtype),
        "model.norm.weight": torch.randn(HIDDEN).to(dtype),
        "lm_head.weight": torch.randn(20, HIDDEN).to(dtype),
    }


def assert_bitwise(state, expected):
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert state[key].dtype == tensor.dtype, key
        assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_round_trip_through_any_two_layouts_is_bitwise(source, target, shared, dtype):
    canonical = canonical_state(shared, dtype)
    there = convert(canonical, "canonical", source)
    assert_bitwise(convert(convert(there, source, target), target, source), there)
    assert_bitwise(convert(there, source, "canonical"), canonical)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_detected_from_what_it_writes(layout):
    assert detect_layout(convert(canonical_state(), "canonical", layout)) == layout


def test_detection_needs_no_particular_expert():
    state = convert(canonical_state(), "canonical", "hf")
    assert detect_layout([key for key in state if ".experts." not in key or ".experts.11." in key]) == "hf"


def test_the_fused_tensor_holds_gate_above_up():
    state = canonical_layer(1, moe=True)
    fused = convert_layer(state, 1, "canonical", "hf_fused")["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(fused[:, :EXPERT_HIDDEN], state["model.layers.1.mlp.experts.gate_proj"])
    assert torch.equal(fused[:, EXPERT_HIDDEN:], state["model.layers.1.mlp.experts.up_proj"])


def test_prime_calls_gate_w1_down_w2_up_w3():
    state = canonical_layer(1, moe=True)
    prime = convert_layer(state, 1, "canonical", "prime")
    for part, short in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        assert torch.equal(
            prime[f"model.layers.1.mlp.experts.{short}"], state[f"model.layers.1.mlp.experts.{part}_proj"]
        )
        assert torch.equal(
            prime[f"model.layers.1.mlp.shared_expert.{short}"],
            state[f"model.layers.1.mlp.shared_expert.{part}_proj.weight"],
        )
    assert "model.layers.1.mlp.expert_bias" in prime


def test_one_layer_is_converted_alone_and_the_source_stays_as_it_was():
    state = canonical_state()
    before = dict(state)
    converted = convert_layer(state, 10, "canonical", "hf")
    assert all(key.startswith("model.layers.10.") for key in converted)
    assert len([key for key in converted if key.endswith("up_proj.weight")]) == NUM_EXPERTS + 1
    assert state == before


def test_a_bias_stored_in_bf16_comes_back_in_fp32():
    state = convert(canonical_state(), "canonical", "hf")
    key = "model.layers.1.mlp.expert_bias"
    state[key] = state[key].bfloat16()
    assert (
        convert(state, "hf", "canonical")["model.layers.1.mlp.router.selection_bias"].dtype == torch.float32
    )


def test_runtime_counters_are_dropped():
    state = convert(canonical_state(), "canonical", "prime")
    extra = {"model.layers.1.mlp.tokens_per_expert": torch.zeros(NUM_EXPERTS)}
    assert_bitwise(convert(state | extra, "prime", "canonical"), convert(state, "prime", "canonical"))


def test_two_biases_in_one_layer_are_an_error():
    state = canonical_layer(1, moe=True)
    state["model.layers.1.mlp.expert_bias"] = torch.zeros(NUM_EXPERTS)
    with pytest.raises(ConfigError, match=r"model\.layers\.1: .*router\.selection_bias and mlp\.expert_bias"):
        convert_layer(state, 1, "canonical", "hf")


def test_a_missing_expert_is_named():
    state = convert(canonical_state(), "canonical", "hf")
    del state["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1: mlp\.experts\.3\.up_proj\.weight is missing"):
        convert_layer(state, 1, "hf", "canonical")


def test_mixed_layouts_are_an_error_that_names_a_key_of_each():
    keys = ["model.layers.1.mlp.experts.w1", "model.layers.2.mlp.experts.gate_up_proj"]
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj is hf_fused, .*experts\.w1 is prime"):
        detect_layout(keys)


def test_foreign_keys_are_listed():
    with pytest.raises(ConfigError, match=r"model\.layers\.\{n\}\.block_sparse_moe\.experts\.\{n\}\.w1"):
        detect_layout(["model.layers.0.block_sparse_moe.experts.0.w1", "model.layers.1.mlp.experts.w9"])
    with pytest.raises(ConfigError, match="none at all"):
        detect_layout([])


def test_a_gated_shared_expert_is_refused():
    with pytest.raises(ConfigError, match="output_gate"):
        detect_layout([*canonical_state(), "model.layers.1.mlp.shared_expert.output_gate.weight"])


def test_an_unknown_layout_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown layout hf_fuse; choose one of: hf_fused"):
        convert_layer({}, 0, "hf_fuse", "hf")
