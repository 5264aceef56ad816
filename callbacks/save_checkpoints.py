"""Writes the run's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from afmoe.checkpoint.directory import checkpoint_name, checkpoints_directory, prune


class SaveCheckpoints(Checkpoint):
    """Saves every `every_n_steps` optimizer steps and after the last one, and keeps the newest `keep_last`.

    A subclass of Lightning's `Checkpoint`, so it runs after the other callbacks and what they count is saved
    with the step that it belongs to.
    """

    def __init__(self, run_directory: Path, every_n_steps: int, keep_last: int) -> None:
        self.run_directory = run_directory
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        step = trainer.global_step
        last_of_epochs = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        is_last = step == trainer.max_steps or last_of_epochs or trainer.should_stop
        if is_last or step % self.every_n_steps == 0:
            path = checkpoints_directory(self.run_directory) / checkpoint_name(step)
            trainer.save_checkpoint(path, weights_only=False)
            if trainer.is_global_zero:
                prune(self.run_directory, self.keep_last)
