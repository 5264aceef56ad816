"""When a run ends: at so many tokens, and after so much time. Steps and epochs are Lightning's own limits."""

from __future__ import annotations

import math
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
        """Optimizer steps of the whole run that `max_tokens` makes; None: another limit comes first."""
        self._trainer: Any = None
        self._max_steps = -1
        self._resume_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._trainer, self._max_steps = trainer, trainer.max_steps
            self._limit_steps()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resume_step = checkpoint["global_step"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # again, from there: the steps behind a continued run may have been of another size. By now the data
        # knows its place, and `throughput`, which stands before this callback, its tokens
        self._limit_steps()

    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.is_step_end(batch_idx):
            super().on_train_batch_end(trainer)

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

    def _limit_steps(self) -> None:
        """To be done before the schedule is made, and before the trainer asks whether anything is left."""
        if self.max_tokens is None:
            return
        trainer = self._trainer
        steps = trainer.datamodule.steps_for_tokens(
            self.max_tokens - self.throughput.tokens,
            most_steps=math.inf if self._max_steps == -1 else self._max_steps - self._resume_step,
            most_epochs=math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs,
        )
        self.steps_for_tokens = None if steps is None else self._resume_step + steps
        trainer.fit_loop.epoch_loop.max_steps = (
            self._max_steps if self.steps_for_tokens is None else self.steps_for_tokens
        )
