"""The model: transformers' field names and defaults, then ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afmoe.config.checks import at_least, one_of, positive
from afmoe.errors import ConfigError

SLIDING_ATTENTION = "sliding_attention"
FULL_ATTENTION = "full_attention"
STRETCHED_ROPE_TYPES = ("llama3", "yarn", "longrope")
"""Rotary types that stretch a trained length: `max_position_embeddings` where nothing else is said."""


@dataclass(kw_only=True)
class AfmoeConfig:
    """Shape and maths of an AFMoE model: transformers' field names and defaults, then ours."""

    vocab_size: int = 200192
    hidden_size: int = 2048
    intermediate_size: int = 6144
    """Hidden size of the dense feed-forward layers."""
    moe_intermediate_size: int = 1408
    """Hidden size of one expert; the shared expert has `num_shared_experts` times as much."""
    num_hidden_layers: int = 32
    num_dense_layers: int = 1
    """Leading layers with a dense feed-forward part instead of experts."""
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 16384
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    """transformers 5 form, `{rope_type, rope_theta, ...}`; None: built from `rope_theta` and `rope_scaling`.
    """
    rope_theta: float | None = None
    """Older top-level form; 10,000 where nothing says otherwise."""
    rope_scaling: dict[str, Any] | None = None
    """Older top-level form, `{type | rope_type, factor, ...}`."""
    num_experts: int = 64
    num_experts_per_tok: int = 6
    """Experts that each token is sent to (top-k)."""
    num_shared_experts: int = 2
    route_scale: float = 1.0
    """Factor on the normalised routing weights."""
    output_router_logits: bool = False
    global_attn_every_n_layers: int = 4
    """Every n-th layer attends to everything (without rotary embedding), the others to a window."""
    sliding_window: int = 1024
    """Tokens that a sliding layer sees, the current one included."""
    layer_types: list[str] | None = None
    """None: derived from `global_attn_every_n_layers`."""
    attention_dropout: float = 0.0
    mup_enabled: bool = False
    """Scale the embeddings by sqrt(hidden_size)."""
    eos_token_id: Any = None
    """One id or a list of ids."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    attention_bias: bool = False

    norm_order: str = "scale_then_cast"
    """RMSNorm: `scale_then_cast` multiplies by the weight in fp32 (transformers), `cast_then_scale` after the
    cast to the activation dtype (the remote code published with the checkpoints).
    """
    router_init: str = "normal"
    """Initial router weights: `normal` draws N(0, initializer_range); `zero` is transformers' choice, under
    which every token of a fresh model goes to the same experts.
    """
    score_func: str = "sigmoid"
    route_norm: bool = True
    """Divide the chosen scores by their sum."""
    score_before_experts: bool = False
    """Multiply an expert's input by its weight, not its output."""

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            every = self.global_attn_every_n_layers
            at_least("global_attn_every_n_layers", every, 1)
            self.layer_types = [
                FULL_ATTENTION if (index + 1) % every == 0 else SLIDING_ATTENTION
                for index in range(self.num_hidden_layers)
            ]
        self._resolve_rope()
        self._check()

    def _resolve_rope(self) -> None:
        """Bring both published forms of the rotary settings to transformers' `rope_parameters`."""
        given = dict((self.rope_scaling or {}) if self.rope_parameters is None else self.rope_parameters)
        if "type" in given:
            given.setdefault("rope_type", given.pop("type"))
        self.rope_parameters = {
            "rope_type": "default",
            "rope_theta": 10000.0 if self.rope_theta is None else self.rope_theta,
        } | given
        if self.rope_parameters["rope_type"] in STRETCHED_ROPE_TYPES:
            self.rope_parameters.setdefault("original_max_position_embeddings", self.max_position_embeddings)

    def _check(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "max_position_embeddings",
            "num_experts",
            "sliding_window",
        ):
            at_least(name, getattr(self, name), 1)
        for name in ("num_dense_layers", "num_shared_experts"):
            at_least(name, getattr(self, name), 0)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or 0
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(
                f"num_key_value_heads must divide num_attention_heads={heads}, got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok must lie in [1, num_experts={self.num_experts}], got "
                f"{self.num_experts_per_tok}"
            )
        types = self.layer_types or []
        if len(types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types lists {len(types)} layers, num_hidden_layers is {self.num_hidden_layers}; "
                "leave layer_types out to derive it"
            )
        for value in types:
            one_of("layer_types", value, (SLIDING_ATTENTION, FULL_ATTENTION))
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(
                f"pad_token_id must be below vocab_size={self.vocab_size}, got {self.pad_token_id}"
            )
        one_of("norm_order", self.norm_order, ("scale_then_cast", "cast_then_scale"))
        one_of("router_init", self.router_init, ("normal", "zero"))
        positive("rms_norm_eps", self.rms_norm_eps)
        positive("rope_theta", (self.rope_parameters or {})["rope_theta"])
        if not self.initializer_range >= 0:
            raise ConfigError(f"initializer_range must not be negative, got {self.initializer_range}")
        if not 0.0 <= self.attention_dropout < 1.0:
            raise ConfigError(f"attention_dropout must lie in [0, 1), got {self.attention_dropout}")


@dataclass(kw_only=True)
class ModelConfig(AfmoeConfig):
    """The `model` group: `AfmoeConfig` and where trained weights come from."""

    pretrained: str | None = None
    """A directory with `config.json` and safetensors, or a hub name; its config wins over the preset."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    explicit: list[str] = field(default_factory=list)
    """Fields that the person set. They must agree with the config of `pretrained`; filled in by `compose.py`.
    """
