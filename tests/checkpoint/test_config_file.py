"""config.json: both published forms, what is refused, and equality with what transformers writes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AfmoeConfig as TransformersConfig
from transformers import AutoConfig

from afmoe.checkpoint.config_file import config_fields, read_config, write_config
from afmoe.config import AfmoeConfig, ModelConfig
from afmoe.errors import ConfigError

VARIANTS = [
    {},
    {
        "num_key_value_heads": 4,
        "num_attention_heads": 8,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
    },
    {"eos_token_id": [1, 3], "tie_word_embeddings": True, "mup_enabled": True, "attention_bias": True},
    {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_the_written_config_is_the_one_that_transformers_writes(fields, tmp_path):
    theirs = TransformersConfig(**copy.deepcopy(fields))
    theirs.architectures, theirs.dtype = ["AfmoeForCausalLM"], "bfloat16"
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert config_fields(AfmoeConfig(**fields), "hf", torch.bfloat16) == written

    write_config(read_config(tmp_path), tmp_path, "hf", torch.bfloat16)
    again = AutoConfig.from_pretrained(tmp_path)
    again.name_or_path = theirs.name_or_path
    assert again.to_dict() == theirs.to_dict()


def test_every_field_of_transformers_is_read_with_its_default():
    ours = config_fields(AfmoeConfig(), "hf", torch.float32)
    assert TransformersConfig().to_diff_dict().keys() <= ours.keys()


def published(tmp_path, **changes):
    """The form of the published checkpoints: rotary and routing fields at top level, remote code named."""
    fields = {
        "architectures": ["AfmoeForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_afmoe.AfmoeForCausalLM"},
        "model_type": "afmoe",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "load_balance_coeff": 0.001,
        "n_group": 1,
        "topk_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "score_func": "sigmoid",
        "route_norm": True,
        "score_before_experts": False,
        "use_grouped_mm": True,
        "rope_theta": 20000.0,
        "rope_scaling": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    return tmp_path


def test_the_published_form_is_read(tmp_path):
    config = read_config(published(tmp_path))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 20000.0}
    assert (config.hidden_size, config.num_key_value_heads) == (64, 2)
    assert len(config.layer_types or []) == 4


def test_older_rope_scaling_becomes_what_transformers_makes_of_it(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "beta_fast": 16.0}
    config = read_config(published(tmp_path, rope_scaling=scaling, max_position_embeddings=1024))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    theirs.pop("type")
    assert config.rope_parameters == theirs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_group", 4),
        ("topk_group", 2),
        ("num_limited_groups", 2),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_field_that_changes_the_maths_is_refused_with_its_value(tmp_path, field, value):
    with pytest.raises(ConfigError) as caught:
        read_config(published(tmp_path, **{field: value}))
    for text in (field, repr(value), "config.json"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"latent_size": 8, "another": 1}, "config.json: unknown field another, latent_size"),
        ({"hidden_size": "64"}, "hidden_size must be int, got '64'"),
        ({"mup_enabled": 1}, "mup_enabled must be bool, got 1"),
        ({"num_experts": True}, "num_experts must be int, got True"),
        ({"num_experts_per_tok": 65}, "config.json: num_experts_per_tok must lie in"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention alone"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta=20000.0 contradicts"),
        (
            {"rope_parameters": {"rope_theta": 20000.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "both rope_parameters and rope_scaling",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(published(tmp_path, **changes))


def test_a_missing_and_a_broken_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_order": "cast_then_scale"},
        {"score_func": "softmax"},
        {"route_norm": False},
        {"score_before_experts": True},
    ],
)
def test_what_transformers_cannot_express_is_refused_in_hf_and_kept_in_canonical(tmp_path, fields):
    config = AfmoeConfig(**fields)
    name = next(iter(fields))
    for layout in ("hf", "hf_fused"):
        with pytest.raises(ConfigError, match=f"{name}=.* choose layout canonical"):
            write_config(config, tmp_path, layout, torch.float32)
    write_config(config, tmp_path, "canonical", torch.float32)
    assert getattr(read_config(tmp_path), name) == fields[name]


def test_where_the_weights_came_from_is_not_written():
    fields = config_fields(ModelConfig(pretrained="somewhere"), "hf", torch.float32)
    assert fields == config_fields(AfmoeConfig(), "hf", torch.float32)
