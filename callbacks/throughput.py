"""How fast a run is and where its time goes: logged, kept over restarts, and said in the progress line.

Lightning's `ThroughputMonitor` waits for the GPU in every step, starts at zero when a run continues, knows no
phases, and its table mixes dense peaks with sparse ones (H200: 2.0e15 for bf16), so clock and table are our
own.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.utilities import rank_zero_info

from afmoe.device_speed import peak_flops
from afmoe.logger.figures import log_figures
from callbacks.step_clock import PHASES, StepClock, step_clock

# the first step also pays for memory, threads and kernels that later ones find ready
_ESTIMATE_AT_STEP = 3


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What was done, all ranks, and how long it took."""

    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """Real tokens: padding does not count."""
    flops: int = 0
    """Operations of `afmoe.flops`."""
    possible_flops: float = 0.0
    """What the devices could have done in the same time; 0 where nobody knows."""
    seconds: dict[str, float]
    """Time training, by phase: start-up and validation left out."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def since(self, earlier: Totals) -> Totals:
        return Totals(
            steps=self.steps - earlier.steps,
            tokens=self.tokens - earlier.tokens,
            flops=self.flops - earlier.flops,
            possible_flops=self.possible_flops - earlier.possible_flops,
            seconds={phase: self.seconds[phase] - earlier.seconds[phase] for phase in PHASES},
        )

    def figures(self) -> dict[str, float]:
        """The metrics of these steps: rates, and seconds per optimizer step."""
        seconds, steps = max(self.total_seconds, 1e-9), max(self.steps, 1)
        values = {"train/tokens_per_second": self.tokens / seconds}
        if self.possible_flops:
            values["train/mfu"] = self.flops / self.possible_flops
        values["time/step_seconds"] = self.total_seconds / steps
        return values | {f"time/{phase}_seconds": self.seconds[phase] / steps for phase in PHASES}


class Throughput(Callback):
    """Counts tokens, operations and time by phase; logs rates of the steps since the last log.

    Stands first among the callbacks, so that what the others do at a step's end is `other` and not the
    optimizer's. The counts are part of each checkpoint, so they go on where a resumed run continues.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        """What was logged last."""
        self.clock = StepClock()
        self._done = Totals(seconds=dict.fromkeys(PHASES, 0.0))
        """Up to the last step; its seconds and what follows from them are those of earlier processes."""
        self._logged = self._done
        self._steps_here = 0
        self._possible_per_second = 0.0
        self._trainer: Trainer | None = None

    @property
    def totals(self) -> Totals:
        """Of the whole run, up to the clock's last `settle`."""
        done, clock = self._done, self.clock
        return Totals(
            steps=done.steps,
            tokens=done.tokens,
            flops=done.flops,
            possible_flops=done.possible_flops + self._possible_per_second * clock.total,
            seconds={phase: done.seconds[phase] + clock.seconds[phase] for phase in PHASES},
        )

    def figures(self) -> dict[str, float]:
        """The whole run's metrics, for `metrics.json`."""
        # a run that was interrupted may leave a device that cannot be waited for: then up to the last log
        totals = self.totals if self.clock.is_settled else self._logged
        return totals.figures() | {"train/peak_memory_gib": self.peak_memory_gib()}

    @property
    def tokens(self) -> int:
        """Real tokens that were trained on: all ranks, the whole run."""
        return self._done.tokens

    def peak_memory_gib(self) -> float:
        """Most memory this process held so far: tensors on a GPU, or all of it in RAM on a CPU."""
        device = None if self._trainer is None else self._trainer.strategy.root_device
        if device is not None and device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**30
        # Linux counts KiB, macOS bytes
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def seconds_left(self, trainer: Any) -> float | None:
        """From the median of recent steps and the last validation; None: the run has no end that is known."""
        step, steps = trainer.global_step, trainer.estimated_stepping_batches
        usual = self.clock.usual_step
        left = None
        if usual is not None and steps != float("inf"):
            validations = _validations(trainer, int(steps)) - _validations(trainer, step)
            left = (steps - step) * usual + validations * self.clock.last_pause
        for timer in trainer.callbacks:
            if isinstance(timer, Timer) and (allowed := timer.time_remaining()) is not None:
                left = allowed if left is None else min(left, allowed)
        return left

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer
        if stage == "fit":
            self.clock = step_clock(trainer.strategy.root_device)
            trainer.datamodule.before_fetch = self._before_fetch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        peak = peak_flops(device, _compute_dtype(str(trainer.precision)))
        if peak is None:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            rank_zero_info(f"train/mfu is not logged: afmoe/device_speed.py knows no peak of {name}")
        self._possible_per_second = (peak or 0.0) * trainer.world_size
        self._logged = self.totals
        self.clock.start()

    def _before_fetch(self) -> None:
        self.clock.mark("other")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.mark("data")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.clock.mark("forward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.clock.mark("backward")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self.clock.mark("optimizer", ends_step=True)
        done = self._done
        self._done = Totals(
            steps=done.steps + 1,
            tokens=done.tokens + batch["num_real_tokens"],
            flops=done.flops + batch["num_flops"],
            possible_flops=done.possible_flops,
            seconds=done.seconds,
        )
        self._steps_here += 1
        if self._steps_here == _ESTIMATE_AT_STEP:
            self._say_how_long(trainer)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self.clock.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.clock.mark("other")
        self.clock.settle()

    def _log(self, trainer: Any) -> None:
        self.clock.settle()
        totals = self.totals
        values = totals.since(self._logged).figures()
        self._logged = totals
        values["train/peak_memory_gib"] = self.peak_memory_gib()
        left = self.seconds_left(trainer)
        if left is not None:
            values["time/left_seconds"] = left
        self.latest = values
        log_figures(trainer, values)

    def _say_how_long(self, trainer: Any) -> None:
        self.clock.settle()
        left, usual = self.seconds_left(trainer), self.clock.usual_step
        steps = trainer.estimated_stepping_batches - trainer.global_step
        if left is not None and usual is not None and steps > 0:
            of_steps = "" if steps == float("inf") else f": {steps:,.0f} steps of {usual:.2f} s"
            rank_zero_info(f"training will take about {timedelta(seconds=round(left))}{of_steps}")

    def state_dict(self) -> dict[str, Any]:
        self.clock.settle()
        totals = self.totals
        return {
            "steps": totals.steps,
            "tokens": totals.tokens,
            "flops": totals.flops,
            "possible_flops": totals.possible_flops,
            "seconds": totals.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done = Totals(**state_dict)


def _validations(trainer: Any, steps: int) -> int:
    """Validations of the first `steps` optimizer steps, the one before the first left out."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or not every or every == float("inf"):
        return 0
    every *= trainer.check_val_every_n_epoch or 1
    return int(steps * trainer.accumulate_grad_batches // every)


def _compute_dtype(precision: str) -> torch.dtype:
    """The dtype of products under Lightning's `precision`."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32
