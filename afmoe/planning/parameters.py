"""Every parameter of a model by name and shape, without making it: what `named_parameters` would list."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from afmoe.config import AfmoeConfig
from afmoe.planning.setup import FP32, Setup


@dataclass(frozen=True)
class Parameter:
    """One parameter as one rank holds it before ZeRO cuts anything."""

    name: str
    shape: tuple[int, ...]
    """Of the local experts, for a routed expert's."""
    is_expert: bool
    is_trained: bool
    num_bytes_each: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return self.numel * self.num_bytes_each

    @cached_property
    def is_hidden_matrix(self) -> bool:
        """What decays, and what Muon moves (`afmoe.optim.groups`)."""
        others = ("embed_tokens.", "lm_head.", "router.")
        return len(self.shape) >= 2 and not any(part in self.name for part in others)

    @cached_property
    def group(self) -> tuple[bool, bool, int]:
        """What ZeRO makes one flat tensor of: (experts, decay, dtype)."""
        return self.is_expert, self.is_hidden_matrix, self.num_bytes_each


def parameters(setup: Setup) -> list[Parameter]:
    """This rank's parameters, in the model's order, before ZeRO."""
    result = []
    for name, shape in shapes(setup.model):
        is_expert, is_router = ".experts." in name, ".router." in name
        result.append(
            Parameter(
                name=name,
                shape=(shape[0] // setup.ep_size, *shape[1:]) if is_expert else shape,
                is_expert=is_expert,
                is_trained=not (is_router and setup.freeze_router)
                and not any(fnmatchcase(name, pattern) for pattern in setup.freeze),
                num_bytes_each=FP32 if is_router and setup.fp32_router else setup.weight_bytes,
            )
        )
    return result


def shapes(config: AfmoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the whole model."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        yield from ((layer + name, shape) for name, shape in _attention(config))
        for norm in ("input", "post_attention", "pre_mlp", "post_mlp"):
            yield f"{layer}{norm}_layernorm.weight", (hidden,)
        if index < config.num_dense_layers:
            yield from _feed_forward(f"{layer}mlp.", hidden, config.intermediate_size)
        else:
            yield from _experts(f"{layer}mlp.", config)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _attention(config: AfmoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, channels = config.hidden_size, config.head_dim
    wide = config.num_attention_heads * channels
    narrow = (config.num_key_value_heads or config.num_attention_heads) * channels
    for name, size in (("q", wide), ("k", narrow), ("v", narrow)):
        yield f"self_attn.{name}_proj.weight", (size, hidden)
        if config.attention_bias:
            yield f"self_attn.{name}_proj.bias", (size,)
    yield "self_attn.o_proj.weight", (hidden, wide)
    if config.attention_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "self_attn.gate_proj.weight", (wide, hidden)
    yield "self_attn.q_norm.weight", (channels,)
    yield "self_attn.k_norm.weight", (channels,)


def _feed_forward(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)


def _experts(prefix: str, config: AfmoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, number = config.hidden_size, config.moe_intermediate_size, config.num_experts
    yield f"{prefix}router.gate.weight", (number, hidden)
    yield f"{prefix}experts.gate_proj", (number, width, hidden)
    yield f"{prefix}experts.up_proj", (number, width, hidden)
    yield f"{prefix}experts.down_proj", (number, hidden, width)
    if config.num_shared_experts:
        yield from _feed_forward(f"{prefix}shared_expert.", hidden, width * config.num_shared_experts)


def buffer_bytes(setup: Setup) -> int:
    """Selection biases (fp32), and the counts of a training forward (int64 an expert, fp32, int64)."""
    return setup.num_moe_layers * (setup.model.num_experts * (FP32 + 8) + FP32 + 8)
