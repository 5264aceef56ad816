"""Ends training for a signal, at the same step on every rank, with its state saved."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from afmoe.faults import LaggedFlag
from afmoe.signals import StopSignals
from callbacks.save_checkpoints import SaveCheckpoints


class StopOnSignal(Callback):
    """Looks for a signal at the end of each optimizer step and each validation batch; on one it saves a
    checkpoint and ends the run.

    Several ranks agree by the largest of their signals, one all-reduce of a single number a step, whose
    outcome is read a step later on a GPU; one rank asks nobody.
    """

    def __init__(self, signals: StopSignals, saver: SaveCheckpoints | None) -> None:
        self.signals = signals
        self.saver = saver
        """What writes the checkpoint; None: the run writes none."""
        self._answers = LaggedFlag()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning put its own handler for SIGTERM in front just now, which would end training between the
        # micro-batches of a step
        self.signals.install()
        self.signals.waits = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        number = self._heard(trainer, pl_module.device, wait=False)
        if number:
            self._end(trainer, number)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit":
            return
        number = self._heard(trainer, pl_module.device, wait=True)
        if number:
            self._end(trainer, number)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        # the last step is saved, what follows ends where it is
        self.signals.waits = False
        number = self._heard(trainer, pl_module.device, wait=True)
        if number:
            self.signals.stop(number, agreed=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.signals.waits = False

    def _heard(self, trainer: Any, device: torch.device, *, wait: bool) -> int:
        """The signal that some rank has received, 0 for none; every rank gets the same answer."""
        number = self.signals.received or 0
        if trainer.world_size == 1:
            return number
        # filled there: a number copied to a GPU is waited for
        largest = trainer.strategy.reduce(torch.full((), float(number), device=device), reduce_op="max")
        self._answers.push(largest)
        return int(max(self._answers.read(wait=wait), default=0.0))

    def _end(self, trainer: Any, number: int) -> None:
        if self.saver is None:
            rank_zero_info("checkpoint.every_n_steps=0: nothing is saved")
        elif trainer.global_step:
            self.saver.save(trainer)
        self.signals.stop(number, agreed=True)
