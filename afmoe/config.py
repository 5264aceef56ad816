"""The typed configuration: the model's (`AfmoeConfig`) and a run's (`RunConfig`).

Plain dataclasses without torch. A section that chooses a plugin (`attention`, `moe.compute`, `data`, ...)
stays a mapping here, `name` and options: its types are checked against the YAML, its values by the plugin's
own `Config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afmoe.errors import ConfigError

SLIDING_ATTENTION = "sliding_attention"
FULL_ATTENTION = "full_attention"


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

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            every = self.global_attn_every_n_layers
            _at_least("global_attn_every_n_layers", every, 1)
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
        self.rope_parameters = {"rope_type": "default", "rope_theta": self.rope_theta or 10000.0} | given

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
            _at_least(name, getattr(self, name), 1)
        for name in ("num_dense_layers", "num_shared_experts"):
            _at_least(name, getattr(self, name), 0)
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
            _one_of("layer_types", value, (SLIDING_ATTENTION, FULL_ATTENTION))
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(
                f"pad_token_id must be below vocab_size={self.vocab_size}, got {self.pad_token_id}"
            )
        _one_of("norm_order", self.norm_order, ("scale_then_cast", "cast_then_scale"))
        _one_of("router_init", self.router_init, ("normal", "zero"))
        _positive("rms_norm_eps", self.rms_norm_eps)
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


@dataclass(kw_only=True)
class TokenizerConfig:
    path: str | None = None
    """A tokenizer directory or hub name; None: the one inside `model.pretrained`, else the embedded byte
    tokenizer.
    """
    resize: bool = False
    """Grow embedding and head when the tokenizer has more tokens than the checkpoint."""


@dataclass(kw_only=True)
class MoeConfig:
    compute: dict[str, Any] = field(default_factory=dict)
    dispatch: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainerConfig:
    """Lightning's own names and meanings (`lightning.Trainer`), except what has a group or key of its own
    here.
    """

    strategy: dict[str, Any] = field(default_factory=dict)
    accelerator: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: str = "32-true"
    max_steps: int = -1
    max_epochs: int | None = None
    max_time: str | None = None
    accumulate_grad_batches: int = 1
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    overfit_batches: Any = 0.0
    log_every_n_steps: int = 10
    enable_progress_bar: bool = True
    deterministic: bool = False
    benchmark: bool | None = None
    detect_anomaly: bool = False
    profiler: str | None = None

    def __post_init__(self) -> None:
        _at_least("trainer.num_nodes", self.num_nodes, 1)
        _at_least("trainer.accumulate_grad_batches", self.accumulate_grad_batches, 1)
        _at_least("trainer.log_every_n_steps", self.log_every_n_steps, 1)
        _at_least("trainer.max_steps", self.max_steps, -1)
        _one_of("trainer.precision", self.precision, PRECISIONS)
        if self.max_epochs is not None:
            _at_least("trainer.max_epochs", self.max_epochs, -1)


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


@dataclass(kw_only=True)
class CheckpointConfig:
    every_n_steps: int = 100
    """Optimizer steps between checkpoints; 0 writes none."""
    keep_last: int = 2
    """Whole checkpoints that are kept."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every_n_steps", self.every_n_steps, 0)
        _at_least("checkpoint.keep_last", self.keep_last, 1)


@dataclass(kw_only=True)
class ExportConfig:
    enabled: bool = True
    layout: str = "hf"
    """Names and shapes of the exported weights."""


@dataclass(kw_only=True)
class SamplesConfig:
    count: int = 4
    """Held-out prompts whose greedy answers are written to TensorBoard at each validation; 0 writes none."""
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        _at_least("samples.count", self.count, 0)
        _at_least("samples.max_new_tokens", self.max_new_tokens, 1)


@dataclass(kw_only=True)
class RunConfig:
    """Everything that decides a run. `compose.py` makes it from Hydra's config."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    attention: dict[str, Any] = field(default_factory=dict)
    moe: MoeConfig = field(default_factory=MoeConfig)
    data: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    run_name: str = "run"
    seed: int = 0
    resume: str = "auto"
    """`auto` continues a run folder that holds a whole checkpoint, `never` refuses one, a path names a
    checkpoint.
    """
    overwrite: bool = False
    """With `resume=never`: move an older run folder of this name aside, to `<run_name>.<n>`."""
    dry_run: bool = False
    """Check everything, read one batch, print the plan, train nothing."""


def _at_least(name: str, value: int, bound: int) -> None:
    if value < bound:
        raise ConfigError(f"{name} must be at least {bound}, got {value}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be positive, got {value}")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {value}")
