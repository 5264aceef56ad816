"""How long the run will take, said once, before its first step."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

# one step's forward is followed by a backward of about twice its cost
_STEP_PER_FORWARD = 3.0


class TimeEstimate(Callback):
    """Times the validation before step 1 and reckons from its tokens per second what training will take.

    A rough figure by construction (it leaves out the optimizer), there before anybody has waited; the
    progress bar takes over from the first step. Says nothing where there is no validation.
    """

    def __init__(self) -> None:
        self._start = 0.0
        self._tokens = 0
        self._done = False

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._start, self._tokens = time.perf_counter(), 0

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._tokens += batch["input_ids"].numel()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._done or not self._tokens:
            return
        self._done = True
        seconds_per_token = (time.perf_counter() - self._start) / self._tokens
        shape = trainer.datamodule.config
        tokens = shape.batch_size * shape.sequence_length * trainer.accumulate_grad_batches
        steps = trainer.estimated_stepping_batches - trainer.global_step
        estimate = timedelta(seconds=round(steps * tokens * seconds_per_token * _STEP_PER_FORWARD))
        rank_zero_info(f"training will take about {estimate} ({steps:,} steps of {tokens:,} tokens a rank)")
