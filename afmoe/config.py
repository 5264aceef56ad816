"""The typed configuration: the model's (`AfmoeConfig`) and a run's (`RunConfig`).

Plain dataclasses without torch. A section that chooses a plugin (`attention`, `moe.compute`, `data`, ...)
stays a mapping here, `name` and options: its types are checked against the YAML, its values by the plugin's
own `Config`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

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
        _positive("rope_theta", (self.rope_parameters or {})["rope_theta"])
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
        self._check_devices()
        _share_or_number("trainer.val_check_interval", self.val_check_interval, zero=False)
        _share_or_number("trainer.limit_train_batches", self.limit_train_batches, zero=False)
        _share_or_number("trainer.limit_val_batches", self.limit_val_batches)
        if self.overfit_batches is None:
            raise ConfigError("trainer.overfit_batches takes a number or a share of the batches, got null")
        _share_or_number("trainer.overfit_batches", self.overfit_batches)
        self._check_whole_steps()
        if self.check_val_every_n_epoch is not None:
            _at_least("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch, 1)
        if self.max_time is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(self.max_time)):
            raise ConfigError(f"trainer.max_time is written DD:HH:MM:SS, got {self.max_time}")
        _one_of("trainer.profiler", self.profiler, (None, "simple", "advanced", "pytorch"))
        _at_least("trainer.max_steps", self.max_steps, -1)
        _one_of("trainer.precision", self.precision, PRECISIONS)
        if self.max_epochs is not None:
            _at_least("trainer.max_epochs", self.max_epochs, -1)

    def _check_devices(self) -> None:
        devices = self.devices
        is_number = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1
        if devices != "auto" and not is_number and not (isinstance(devices, list) and devices):
            raise ConfigError(
                f"trainer.devices takes auto, a number from 1 or a list of numbers, got {devices}"
            )
        if isinstance(devices, list) and not all(isinstance(index, int) and index >= 0 for index in devices):
            raise ConfigError(f"trainer.devices lists device numbers from 0, got {devices}")

    def _check_whole_steps(self) -> None:
        """Lightning steps at the end of a cut epoch although micro-batches are missing."""
        for name in ("limit_train_batches", "overfit_batches"):
            value = getattr(self, name)
            if self.accumulate_grad_batches == 1 or value in (None, 0, 1.0):
                continue
            if isinstance(value, float) or value % self.accumulate_grad_batches:
                raise ConfigError(
                    f"trainer.{name} must be a multiple of trainer.accumulate_grad_batches="
                    f"{self.accumulate_grad_batches}, so that optimizer steps are whole, got {value}"
                )


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

    def __post_init__(self) -> None:
        # the bound of numpy's generators
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must lie in [0, 4294967295], got {self.seed}")
        parts = self.run_name.split("/")
        if not self.run_name.isprintable() or any(part in ("", ".", "..") for part in parts):
            raise ConfigError(f"run_name must be the name of a folder below outputs/, got {self.run_name!r}")


def _at_least(name: str, value: int, bound: int) -> None:
    if value < bound:
        raise ConfigError(f"{name} must be at least {bound}, got {value}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be positive, got {value}")


def _one_of(name: str, value: str | None, valid: tuple[str | None, ...]) -> None:
    if value not in valid:
        listed = ", ".join("null" if one is None else one for one in valid)
        raise ConfigError(f"{name} must be one of {listed}, got {value}")


def _share_or_number(name: str, value: Any, *, zero: bool = True) -> None:
    """Lightning's two readings: a whole number of batches, or with a decimal point a share from 0 to 1."""
    if value is None:
        return
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_share = isinstance(value, float) and 0.0 <= value <= 1.0
    if not (is_number or is_share) or (value == 0 and not zero):
        bound = "0" if zero else "1"
        raise ConfigError(
            f"{name} takes a whole number from {bound} or a share up to 1.0, or null, got {value}"
        )
