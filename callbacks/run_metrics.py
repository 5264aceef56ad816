"""What `metrics.json` says of a run, kept while it goes on and over restarts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from afmoe.checkpoint.atomic import write_text
from afmoe.moe.statistics import max_violation
from callbacks.gather_steps import GatherSteps
from callbacks.run_length import RunLength
from callbacks.skip_bad_steps import SkipBadSteps
from callbacks.throughput import Throughput

C = TypeVar("C", bound=Callback)


class RunMetrics(Callback):
    """The last losses, the last validation and the last step's balance: what a checkpoint has to carry."""

    def __init__(self, steps: GatherSteps) -> None:
        self.steps = steps
        self.validation: dict[str, float] = {}
        self.validated_step = -1
        self._resumed_violation: float | None = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validation = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if name.startswith("val/")
            }
            self.validated_step = trainer.global_step

    def losses(self) -> list[float]:
        """The last 20 steps' losses, over all ranks, skipped steps left out. Every rank has to ask."""
        self.steps.read()
        return [loss for loss in self.steps.recent_losses if math.isfinite(loss)]

    def max_violation(self) -> float | None:
        """Overload of the last step, mean over the layers; None without experts. Every rank has to ask."""
        self.steps.read()
        last = self.steps.last
        if last is None:
            return self._resumed_violation
        return float(max_violation(last.counts_LE).mean()) if len(last.counts_LE) else None

    def state_dict(self) -> dict[str, Any]:
        # Lightning collects a checkpoint on every rank, so all of them take part in the sums
        self.steps.read()
        return {
            # skipped ones too: a step further they may be beyond the last 20
            "recent_losses": list(self.steps.recent_losses),
            "validation": self.validation,
            "validated_step": self.validated_step,
            "max_violation": self.max_violation(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps.recent_losses.extend(state_dict["recent_losses"])
        self.validation = dict(state_dict["validation"])
        self.validated_step = state_dict["validated_step"]
        self._resumed_violation = state_dict["max_violation"]


def write_metrics(path: Path, trainer: Trainer, status: str) -> dict[str, Any]:
    """Write `metrics.json` (rank 0) and return what it holds. Every rank has to call it."""
    metrics, throughput = callback_of(trainer, RunMetrics), callback_of(trainer, Throughput)
    losses = metrics.losses()
    values: dict[str, Any] = {
        "status": status,
        "stopped_by": callback_of(trainer, RunLength).stopped_by(trainer) if status == "finished" else None,
        "train/loss": sum(losses) / len(losses) if losses else None,
        "train/steps": trainer.global_step,
        "train/skipped_steps": callback_of(trainer, SkipBadSteps).skipped,
        "train/tokens": throughput.tokens,
        **throughput.figures(),
        "moe/max_violation": metrics.max_violation(),
        # NaN is no JSON
        **{name: value if math.isfinite(value) else None for name, value in metrics.validation.items()},
    }
    if trainer.is_global_zero:
        write_text(path, json.dumps(values, indent=2) + "\n")
    return values


def callback_of(trainer: Any, kind: type[C]) -> C:
    """The run's callback of a kind that every run has."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))
