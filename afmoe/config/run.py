"""Everything that decides a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afmoe.config.checks import at_least, one_of
from afmoe.config.model import ModelConfig
from afmoe.config.trainer import TrainerConfig
from afmoe.errors import ConfigError


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
class MemoryConfig:
    activation_checkpointing: str = "none"
    """What backward computes again to keep less: `none`, `full` (all inside each decoder layer), `selective`
    (all but routing and what dispatch and combine bring)."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at a time while the loss is computed; None: chosen by size."""
    compile_layers: bool = False
    """`torch.compile` each decoder layer, in training."""

    def __post_init__(self) -> None:
        one_of("memory.activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        if self.loss_chunk_tokens is not None:
            at_least("memory.loss_chunk_tokens", self.loss_chunk_tokens, 1)


CHECKPOINTING = ("none", "full", "selective")


@dataclass(kw_only=True)
class CheckpointConfig:
    every_n_steps: int = 100
    """Optimizer steps between checkpoints; 0 writes none."""
    keep_last: int = 2
    """Newest whole checkpoints that are kept."""
    best_metric: str | None = None
    """A figure of the validation, `val/loss` say: the checkpoint where it was best is kept too."""
    best_mode: str = "min"
    """`min` or `max`: which values of that figure are better."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every_n_steps", self.every_n_steps, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        one_of("checkpoint.best_mode", self.best_mode, ("min", "max"))
        if self.best_metric is not None and not self.every_n_steps:
            raise ConfigError(
                f"checkpoint.best_metric={self.best_metric} needs checkpoints, but "
                "checkpoint.every_n_steps=0 writes none"
            )


@dataclass(kw_only=True)
class FaultsConfig:
    max_skipped_steps: int = 10
    """Optimizer steps in a row without a finite loss and gradient after which the run stops."""

    def __post_init__(self) -> None:
        at_least("faults.max_skipped_steps", self.max_skipped_steps, 1)


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
        at_least("samples.count", self.count, 0)
        at_least("samples.max_new_tokens", self.max_new_tokens, 1)


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
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
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
        self._check_validation_borders()

    def _check_validation_borders(self) -> None:
        """What looks at a validation to save or to stop needs one that falls between optimizer steps."""
        interval, accumulate = self.trainer.val_check_interval, self.trainer.accumulate_grad_batches
        user = "callbacks=early_stopping" if "early_stopping" in self.callbacks else None
        user = "checkpoint.best_metric" if self.checkpoint.best_metric is not None else user
        is_number = isinstance(interval, int) and not isinstance(interval, bool)
        if user is not None and is_number and interval % accumulate:
            raise ConfigError(
                f"{user} needs trainer.val_check_interval={interval}, which counts micro-batches, to be a "
                f"multiple of trainer.accumulate_grad_batches={accumulate}"
            )
