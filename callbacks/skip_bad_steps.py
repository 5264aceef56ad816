"""Counts the optimizer steps skipped for a NaN or an infinity, and stops a run that makes no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from afmoe.endings import Diverged, for_rank
from afmoe.faults import LaggedFlag

SaveFault = Callable[[Trainer, LightningModule, list[dict[str, Any]]], Path]


class SkipBadSteps(Callback):
    """Counts steps whose loss or gradient is no finite number. The optimizer leaves them out by itself.

    After `limit` of them in a row the run stops. Weights have not changed since the last good step then, so
    the step's batches, which `save` writes with the weights, show the fault again. While a further bad step
    would not be the last, its flag is read a step late, and a GPU is never waited for.
    """

    def __init__(self, limit: int, save: SaveFault) -> None:
        self.limit = limit
        self.save = save
        self.skipped = 0
        """Steps left out, the whole run."""
        self.in_a_row = 0
        self._flags = LaggedFlag()
        self._micro_batches: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._micro_batches = []
        self._micro_batches.append(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self._flags.push(pl_module.bad_step)
        self._count(wait=False)
        if self.in_a_row + 1 >= self.limit:
            self._count(wait=True)
        if self.in_a_row >= self.limit:
            self._stop(trainer, pl_module)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log("train/skipped_steps", float(self.skipped))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count(wait=True)

    def state_dict(self) -> dict[str, Any]:
        self._count(wait=True)
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def _count(self, *, wait: bool) -> None:
        for flag in self._flags.read(wait=wait):
            self.skipped += int(flag)
            self.in_a_row = self.in_a_row + 1 if flag else 0

    def _stop(self, trainer: Trainer, pl_module: Any) -> None:
        directory = self.save(trainer, pl_module, self._micro_batches)
        # a copy: the reduction works in place
        loss = trainer.strategy.reduce(pl_module.step_loss.clone(), reduce_op="sum")
        error = Diverged(
            f"{self.in_a_row} optimizer steps in a row, up to {trainer.global_step}, had a loss or gradient "
            f"that is no finite number (loss {float(loss)}, gradient norm "
            f"{float(pl_module.gradient_norm)}) and were skipped. Where it begins: python "
            f"scripts/replay_batch.py {directory} (the step's batches and weights). Lower optim.lr or "
            "optim.gradient_clip, or look at the data; earlier checkpoints are whole"
        )
        raise for_rank(error, trainer.global_rank)
