"""The progress line."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import rich.progress
from lightning.pytorch.callbacks import ProgressBar
from rich.table import Column

from callbacks.throughput import Throughput

_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "data": "data"}


class Progress(ProgressBar):
    """How far the run is and what `Throughput` measured last, in one line of at most 100 columns.

    Lightning's own bar reads its figures back from the device after every batch, so it waits for the device;
    this one reads them where they are logged.
    """

    def __init__(self, throughput: Throughput) -> None:
        super().__init__()
        self.throughput = throughput
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._is_enabled = True

    def enable(self) -> None:
        self._is_enabled = True

    def disable(self) -> None:
        self._is_enabled = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._start(_steps(trainer), trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None or not pl_module.is_step_end(batch_idx):
            return
        step = trainer.global_step
        self._bar.update(self._task, completed=step, total=_steps(trainer), done=_done(step, _steps(trainer)))
        if step % trainer.log_every_n_steps == 0:
            metrics = self.get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            self._bar.update(self._task, figures=line(metrics, self.throughput.latest))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._start(None, trainer.global_step)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._task, doing=f"validation {batch_idx + 1}/{sum(trainer.num_val_batches)}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, doing="")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.console.print(*args, **kwargs)

    def _start(self, total: float | None, step: int) -> None:
        if self._bar is not None or not self._is_enabled:
            return
        text = rich.progress.TextColumn
        # on a narrow terminal the figures are cut, not the step
        done = Column(no_wrap=True, min_width=len("1234/9999"))
        self._bar = rich.progress.Progress(
            text("{task.fields[done]}", markup=False, table_column=done),
            rich.progress.BarColumn(bar_width=5, table_column=Column(min_width=5)),
            text("{task.fields[doing]}{task.fields[figures]}", markup=False),
            refresh_per_second=4,
            # a validation on its own leaves nothing behind
            transient=total is None and step > 0,
        )
        self._task = self._bar.add_task(
            "", total=total, completed=step, done=_done(step, total), doing="", figures=""
        )
        self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def line(metrics: dict[str, Any], figures: dict[str, float]) -> str:
    """The figures in short: metrics of the progress bar, then speed, memory, where time goes, time left."""
    parts = [f"{name.removeprefix('train/')} {_number(value)}" for name, value in metrics.items()]
    if "train/tokens_per_second" in figures:
        parts.append(f"{_count(figures['train/tokens_per_second'])} tok/s")
    if "train/mfu" in figures:
        parts.append(f"mfu {figures['train/mfu']:.0%}")
    if "train/peak_memory_gib" in figures:
        parts.append(f"{figures['train/peak_memory_gib']:.3g} GiB")
    step_seconds = figures.get("time/step_seconds", 0.0)
    if step_seconds:
        shares = (
            f"{short} {figures[f'time/{phase}_seconds'] / step_seconds * 100:.0f}"
            for phase, short in _SHORT.items()
        )
        parts.append(" ".join(shares) + " %")
    if "time/left_seconds" in figures:
        parts.append(f"left {_duration(figures['time/left_seconds'])}")
    return "  ".join(parts)


def _steps(trainer: Any) -> float | None:
    """Optimizer steps of the run; None: no end is known."""
    steps = trainer.estimated_stepping_batches
    return None if math.isinf(steps) else steps


def _done(step: int, total: float | None) -> str:
    return f"{step}/{total:.0f}" if total is not None and total < 10_000 else f"{step:,}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    if seconds >= 86_400:
        return f"{seconds // 86_400:.0f}d {seconds % 86_400 // 3600:.0f}h"
    return str(timedelta(seconds=round(seconds)))
