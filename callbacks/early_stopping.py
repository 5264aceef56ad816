"""Ends a run whose held-out figure no longer gets better."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch.callbacks
from lightning.pytorch import LightningModule, Trainer

from afmoe.config.checks import at_least, not_negative, one_of
from afmoe.errors import ConfigError, closest
from afmoe.registry import register


@register("callbacks", "early_stopping")
class EarlyStopping(lightning.pytorch.callbacks.EarlyStopping):
    """Lightning's `EarlyStopping`, at each validation; what it has seen is part of every checkpoint."""

    @dataclass(kw_only=True)
    class Config:
        monitor: str = "val/loss"
        """A figure that is logged at validation."""
        mode: str = "min"
        """`min` or `max`: which values are better."""
        patience: int = 3
        """Validations in a row without a better value before the run ends."""
        min_delta: float = 0.0
        """By how much a value must be better to count."""

        def __post_init__(self) -> None:
            one_of("callbacks.early_stopping.mode", self.mode, ("min", "max"))
            at_least("callbacks.early_stopping.patience", self.patience, 1)
            not_negative("callbacks.early_stopping.min_delta", self.min_delta)

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.monitor,
            mode=config.mode,
            patience=config.patience,
            min_delta=config.min_delta,
            verbose=True,
            check_on_train_epoch_end=False,
            log_rank_zero_only=True,
        )
        self._patience = config.patience

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        # Lightning would go on with the patience of the checkpoint
        self.patience = self._patience

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor not in trainer.callback_metrics:
            known = [name for name in trainer.callback_metrics if name.startswith("val/")]
            raise ConfigError(
                f"callbacks.early_stopping.monitor={self.monitor} is not logged at validation; choose one "
                f"of: {closest(self.monitor, known)}"
            )
        super().on_validation_end(trainer, pl_module)
