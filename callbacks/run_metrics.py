"""The figures of a run: logged while it goes on, and kept for `metrics.json`."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from afmoe.checkpoint.atomic import write_text
from afmoe.model import iter_moe_blocks
from afmoe.moe.statistics import max_violation
from callbacks.run_length import RunLength
from callbacks.skip_bad_steps import SkipBadSteps
from callbacks.throughput import Throughput

_RECENT_STEPS = 20

C = TypeVar("C", bound=Callback)


class RunMetrics(Callback):
    """Logs loss and gradient norm; keeps what `metrics.json` says, over restarts too."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.recent_losses: deque[torch.Tensor] = deque(maxlen=_RECENT_STEPS)
        """This rank's share of the last steps' losses. Not read back before they are needed."""
        self.validation: dict[str, float] = {}
        self.validated_step = -1
        self.max_violation: float | None = None
        self._resumed_losses: list[float] = []
        self._trainer: Trainer | None = None

    @property
    def tokens(self) -> int:
        """Real tokens that were trained on: all ranks, the whole run."""
        return self.throughput.tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validation = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.startswith("val/")
            }
            self.validated_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self.recent_losses.append(pl_module.step_loss)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            # a copy: the reduction works in place
            loss = trainer.strategy.reduce(pl_module.step_loss.clone(), reduce_op="sum")
            pl_module.log("train/loss", loss, prog_bar=True)
            pl_module.log("train/gradient_norm", pl_module.gradient_norm)
            self.losses()

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
        """The last 20 steps' losses, over all ranks, skipped steps left out. Every rank has to ask."""
        fresh: list[float] = []
        if self.recent_losses and self._trainer is not None:
            shares = torch.stack(list(self.recent_losses))
            fresh = self._trainer.strategy.reduce(shares, reduce_op="sum").tolist()
        return [*self._resumed_losses, *filter(math.isfinite, fresh)][-_RECENT_STEPS:]

    def state_dict(self) -> dict[str, Any]:
        # Lightning collects a checkpoint on every rank, so all of them take part in the sums
        self._measure_violation()
        return {
            "recent_losses": self.losses(),
            "validation": self.validation,
            "validated_step": self.validated_step,
            "max_violation": self.max_violation,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed_losses = list(state_dict["recent_losses"])
        self.validation = dict(state_dict["validation"])
        self.validated_step = state_dict["validated_step"]
        self.max_violation = state_dict["max_violation"]


def write_metrics(path: Path, trainer: Trainer, metrics: RunMetrics, status: str) -> dict[str, Any]:
    """Write `metrics.json` (rank 0) and return what it holds. Every rank has to call it."""
    losses = metrics.losses()
    values: dict[str, Any] = {
        "status": status,
        "stopped_by": _callback(trainer, RunLength).stopped_by(trainer) if status == "finished" else None,
        "train/loss": sum(losses) / len(losses) if losses else None,
        "train/steps": trainer.global_step,
        "train/skipped_steps": _callback(trainer, SkipBadSteps).skipped,
        "train/tokens": metrics.tokens,
        **metrics.throughput.figures(),
        "moe/max_violation": metrics.max_violation,
        # NaN is no JSON
        **{name: value if math.isfinite(value) else None for name, value in metrics.validation.items()},
    }
    if trainer.is_global_zero:
        write_text(path, json.dumps(values, indent=2) + "\n")
    return values


def _callback(trainer: Any, kind: type[C]) -> C:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))
