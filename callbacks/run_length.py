"""When a run ends: at so many tokens, and after so much time. Steps and epochs are Lightning's own limits."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from callbacks.throughput import Throughput


class RunLength(Timer):
    """Lightning's `Timer`, which here stops between optimizer steps only, and a limit in tokens.

    The limit in tokens becomes one in steps: how many tokens each step holds is known beforehand, from the
    plan of the packs. So schedules, progress and the time that is left know where the run ends.
    """

    def __init__(self, max_time: str | None, max_tokens: int | None, throughput: Throughput) -> None:
        """`throughput` knows how many tokens a continued run has behind it."""
        super().__init__(duration=max_time)
        self.max_tokens = max_tokens
        self.throughput = throughput
        self.steps_for_tokens: int | None = None
        """Optimizer steps of the whole run that `max_tokens` makes."""
        self._max_steps: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # before the schedule is made
        if stage == "fit" and self.max_tokens is not None:
            self._limit_steps(trainer, self.max_tokens, tokens_done=0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.global_step and self.max_tokens is not None:
            # the steps behind a continued run may have been of another size
            self._limit_steps(trainer, self.max_tokens, self.throughput.tokens)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        module: Any = trainer.lightning_module
        batch_idx = kwargs["batch_idx"] if "batch_idx" in kwargs else args[-1]
        if module.is_step_end(batch_idx):
            super().on_train_batch_end(trainer, *args, **kwargs)

    def stopped_by(self, trainer: Trainer) -> str | None:
        """The limit that ended training, as `trainer.<name>`; `early_stopping`; None when none did."""
        reached = {
            "early_stopping": any(
                callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED
                for callback in trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
                if isinstance(callback, EarlyStopping)
            ),
            "max_tokens": trainer.global_step == self.steps_for_tokens,
            "max_steps": trainer.global_step == trainer.max_steps,
            "max_time": self._duration is not None and self.time_elapsed() >= self._duration,
            "max_epochs": trainer.max_epochs not in (None, -1)
            and trainer.current_epoch >= trainer.max_epochs,
        }
        return next((name for name, is_reached in reached.items() if is_reached), None)

    def _limit_steps(self, trainer: Trainer, max_tokens: int, tokens_done: int) -> None:
        if self._max_steps is None:
            self._max_steps = trainer.max_steps
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        steps = trainer.global_step + data.steps_for_tokens(max_tokens - tokens_done)
        self.steps_for_tokens = steps
        trainer.fit_loop.epoch_loop.max_steps = (
            steps if self._max_steps == -1 else min(steps, self._max_steps)
        )
