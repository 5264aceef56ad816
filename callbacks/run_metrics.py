"""The figures of a run: logged while it goes on, and kept for `metrics.json`."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from afmoe.checkpoint.atomic import write_text
from afmoe.errors import UserError
from afmoe.model import iter_moe_blocks
from afmoe.moe.statistics import max_violation

_RECENT_STEPS = 20


class Diverged(UserError):
    """The loss is no number any more. Raised where it is read: at logs, checkpoints and the end."""


class RunMetrics(Callback):
    """Logs loss, gradient norm and real tokens per second; counts tokens and training time over the whole
    run.

    The counts are part of each checkpoint, so they go on where a resumed run continues.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Real tokens that were trained on: all ranks, the whole run."""
        self.seconds = 0.0
        """Time spent training: validation and start-up left out."""
        self.recent_losses: deque[torch.Tensor] = deque(maxlen=_RECENT_STEPS)
        """This rank's share of the last steps' losses. Not read back before they are needed."""
        self.validation: dict[str, float] = {}
        self.validated_step = -1
        self.max_violation: float | None = None
        self._resumed_losses: list[float] = []
        self._mark = 0.0
        self._logged = (0, 0.0)
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._logged = (self.tokens, self.seconds)
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validation = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.startswith("val/")
            }
            self.validated_step = trainer.global_step
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self.tokens += batch["num_real_tokens"]
        self.recent_losses.append(pl_module.step_loss)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            # a copy: the reduction works in place
            loss = trainer.strategy.reduce(pl_module.step_loss.clone(), reduce_op="sum")
            pl_module.log("train/loss", loss, prog_bar=True)
            pl_module.log("train/gradient_norm", pl_module.gradient_norm)
            self.losses()
        # an asynchronous device has finished the steps up to here by the time its loss is read for the log
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now
        if trainer.global_step % trainer.log_every_n_steps == 0:
            tokens, seconds = self._logged
            self._logged = (self.tokens, self.seconds)
            rate = (self.tokens - tokens) / max(self.seconds - seconds, 1e-9)
            pl_module.log("train/tokens_per_second", rate, prog_bar=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._measure_violation()

    def _measure_violation(self) -> None:
        """Take the overload of the last step, mean over the layers. Every rank has to."""
        if self._trainer is None:
            return
        blocks = iter_moe_blocks(self._trainer.lightning_module)
        counts = [block.statistics.counts_E for block in blocks if block.statistics is not None]
        if counts:
            counts_LE = self._trainer.strategy.reduce(torch.stack(counts), reduce_op="sum")
            self.max_violation = float(max_violation(counts_LE).mean())

    def losses(self) -> list[float]:
        """The last 20 steps' losses, over all ranks. Every rank has to ask."""
        fresh: list[float] = []
        if self.recent_losses and self._trainer is not None:
            shares = torch.stack(list(self.recent_losses))
            fresh = self._trainer.strategy.reduce(shares, reduce_op="sum").tolist()
            if not all(map(math.isfinite, fresh)):
                raise Diverged(
                    f"the loss is {fresh[-1]} by step {self._trainer.global_step}: lower optim.lr or set "
                    "optim.gradient_clip; earlier checkpoints are whole"
                )
        return [*self._resumed_losses, *fresh][-_RECENT_STEPS:]

    def state_dict(self) -> dict[str, Any]:
        # Lightning collects a checkpoint on every rank, so all of them take part in the sums
        self._measure_violation()
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "recent_losses": self.losses(),
            "validation": self.validation,
            "validated_step": self.validated_step,
            "max_violation": self.max_violation,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]
        self.seconds = state_dict["seconds"]
        self._resumed_losses = list(state_dict["recent_losses"])
        self.validation = dict(state_dict["validation"])
        self.validated_step = state_dict["validated_step"]
        self.max_violation = state_dict["max_violation"]


def write_metrics(path: Path, trainer: Trainer, metrics: RunMetrics, status: str) -> dict[str, Any]:
    """Write `metrics.json` (rank 0) and return what it holds. Every rank has to call it."""
    try:
        losses = metrics.losses()
    except Diverged:
        losses = []
    values: dict[str, Any] = {
        "status": status,
        "train/loss": sum(losses) / len(losses) if losses else None,
        "train/steps": trainer.global_step,
        "train/tokens": metrics.tokens,
        "train/tokens_per_second": metrics.tokens / metrics.seconds if metrics.seconds else None,
        "moe/max_violation": metrics.max_violation,
        # NaN is no JSON
        **{name: value if math.isfinite(value) else None for name, value in metrics.validation.items()},
    }
    if trainer.is_global_zero:
        write_text(path, json.dumps(values, indent=2) + "\n")
    return values
