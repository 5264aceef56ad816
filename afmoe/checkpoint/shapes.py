"""Name, shape and dtype of every tensor that a config asks for, from the config alone."""

from __future__ import annotations

import torch
from torch import Tensor

from afmoe.checkpoint.layouts import layer_prefix
from afmoe.checkpoint.model_directory import EMBEDDING, HEAD
from afmoe.config import AfmoeConfig


def canonical_specs(config: AfmoeConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Canonical key to a tensor on the meta device, as `AfmoeForCausalLM(config)` has them; a tied head once.

    A conversion checks files with it and needs no model.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        own = _attention(config) | {
            f"{name}.weight": (hidden,)
            for name in (
                *("input_layernorm", "post_attention_layernorm"),
                *("pre_mlp_layernorm", "post_mlp_layernorm"),
            )
        }
        own |= (
            _feed_forward("mlp", hidden, config.intermediate_size)
            if layer < config.num_dense_layers
            else _moe(config)
        )
        shapes |= {layer_prefix(layer) + name: shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return {
        key: torch.empty(
            shape, dtype=torch.float32 if key.endswith("selection_bias") else dtype, device="meta"
        )
        for key, shape in shapes.items()
    }


def _attention(config: AfmoeConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}.weight": (size, queries if name == "o_proj" else hidden)
        for name, size in outputs.items()
    }
    if config.attention_bias:
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in outputs.items()}
    return shapes | {
        "self_attn.gate_proj.weight": (queries, hidden),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }


def _moe(config: AfmoeConfig) -> dict[str, tuple[int, ...]]:
    num_experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.router.gate.weight": (num_experts, hidden),
        "mlp.router.selection_bias": (num_experts,),
        "mlp.experts.gate_proj": (num_experts, inner, hidden),
        "mlp.experts.up_proj": (num_experts, inner, hidden),
        "mlp.experts.down_proj": (num_experts, hidden, inner),
    }
    if config.num_shared_experts:
        shapes |= _feed_forward("mlp.shared_expert", hidden, inner * config.num_shared_experts)
    return shapes


def _feed_forward(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }
