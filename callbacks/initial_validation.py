"""Validation at the start: before the first step, and where a run was stopped before one was over."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from callbacks.save_checkpoints import is_last_step


class InitialValidation(Callback):
    """Runs the validation loop at step 0, and at the step that a run continues from if the one that was due
    there is missing.

    A checkpoint is written before its step is validated, and says whether that was to follow.
    """

    def __init__(self, *, last_counts: bool) -> None:
        """`last_counts`: something goes by the validation of the run's last weights too (the best
        checkpoint), which comes after training and after the last checkpoint.
        """
        self.last_counts = last_counts
        self._trainer: Trainer | None = None
        self._validated_step = -1
        self._is_missing = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0 and not self._is_missing:
            return
        # the same loop, on the wrapped model, that Lightning runs between training batches
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False
        trainer.validating = True
        loop.run()
        trainer.training = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        assert self._trainer is not None
        is_done = self._validated_step == self._trainer.global_step
        follows = validation_follows(self._trainer) or (self.last_counts and is_last_step(self._trainer))
        return {"is_missing": not is_done and follows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_missing = state_dict["is_missing"]


def validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates after the running batch, by the interval that was asked for."""
    if not trainer.enable_validation:
        return False
    every_n_epochs = trainer.check_val_every_n_epoch
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if every_n_epochs is None:
        num_batches = progress.total.ready
    elif (trainer.current_epoch + 1) % every_n_epochs:
        return False
    else:
        num_batches = progress.current.ready
    assert trainer.val_check_batch is not None, "an interval in time is not offered"
    return num_batches % trainer.val_check_batch == 0
