"""Writes the run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from afmoe.checkpoint.directory import checkpoint_name, checkpoints_directory, point_best, prune
from afmoe.config import CheckpointConfig
from afmoe.endings import EndedByAnother, NotSaved
from afmoe.errors import ConfigError, closest
from afmoe.run import Run


class SaveCheckpoints(Checkpoint):
    """Saves every `every_n_steps` optimizer steps, after the last one and when a validation was the best,
    and keeps the newest `keep_last` and the best.

    A subclass of Lightning's `Checkpoint`, so it runs after the other callbacks and what they count is saved
    with the step that it belongs to.
    """

    def __init__(self, run: Run, config: CheckpointConfig) -> None:
        self.run_directory = run.directory
        self.config = config
        self.best_value: float | None = None
        # the checkpoint that the run continues from stays as it is
        self._saved_step = run.resume_step or -1

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        if is_last_step(trainer) or trainer.global_step % self.config.every_n_steps == 0:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # also at the start: a name that is wrong is not to be found out after hours
        self._check_metric(trainer)
        # before the first step and inside a step there is nothing to save
        micro_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.global_step == 0 or micro_batches % trainer.accumulate_grad_batches:
            return
        is_best = self._is_best(trainer)
        # the validation of the last weights comes after training, and their checkpoint is there
        if trainer.state.fn == "fit" and (is_best or trainer.should_stop):
            self.save(trainer)
        # a run that began from another run's checkpoint has none of that step
        if is_best and trainer.is_global_zero and self._path(trainer.global_step).is_dir():
            point_best(self._path(trainer.global_step))
            prune(self.run_directory, self.config.keep_last)

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of the last optimizer step, unless it is there."""
        if self._saved_step == trainer.global_step:
            return
        self._save(trainer, self._path(trainer.global_step))
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            prune(self.run_directory, self.config.keep_last)

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_value = state_dict["best_value"]

    def _save(self, trainer: Trainer, path: Path) -> None:
        """Every rank ends here when the one that writes cannot: raises `NotSaved` there."""
        failure: NotSaved | None = None
        try:
            with _at_the_steps_end(trainer):
                trainer.save_checkpoint(path, weights_only=False)
        except NotSaved as error:
            failure = error
            # the other ranks wait here for this one
            trainer.strategy.barrier("Trainer.save_checkpoint")
        if trainer.world_size > 1:
            failed = torch.full((), float(failure is not None), device=trainer.strategy.root_device)
            if trainer.strategy.reduce(failed, reduce_op="max") and failure is None:
                raise EndedByAnother(agreed=True)
        if failure is not None:
            raise failure

    def _path(self, step: int) -> Path:
        return checkpoints_directory(self.run_directory) / checkpoint_name(step)

    def _check_metric(self, trainer: Trainer) -> None:
        metric = self.config.best_metric
        known = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
        if metric is not None and metric not in known:
            raise ConfigError(
                f"checkpoint.best_metric={metric} is not logged at validation; choose one of: "
                f"{closest(metric, known)}"
            )

    def _is_best(self, trainer: Trainer) -> bool:
        metric = self.config.best_metric
        if metric is None:
            return False
        value = float(trainer.callback_metrics[metric])
        before = self.best_value
        # a comparison with NaN is false, so that NaN is never the best
        better = value == value and (
            before is None or (value < before if self.config.best_mode == "min" else value > before)
        )
        if better:
            self.best_value = value
        return better


def is_last_step(trainer: Any) -> bool:
    """Whether the optimizer step that was just taken is the run's last, as far as is known by now."""
    last_of_epochs = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or last_of_epochs or trainer.should_stop


@contextmanager
def _at_the_steps_end(trainer: Trainer) -> Iterator[None]:
    """Let the loop say what it says at the end of a step's last batch, also when validation came after it.

    Lightning counts a batch as completed between the two, and continues a checkpoint in another way then.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    counts = (progress.total, progress.current)
    completed = [count.completed for count in counts]
    for count in counts:
        count.completed = count.processed - 1
    try:
        yield
    finally:
        for count, number in zip(counts, completed, strict=True):
            count.completed = number
