"""How long the run will take, said once, after its first steps."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

# the first step also pays for memory, threads and kernels that later ones find ready
_FIRST_MEASURED, _LAST_MEASURED = 1, 3


class TimeEstimate(Callback):
    """Times the second and third step of this process and reckons from them; validation comes on top."""

    def __init__(self) -> None:
        self._steps = 0
        self._start = 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps >= _LAST_MEASURED or not pl_module.is_step_end(batch_idx):
            return
        self._steps += 1
        if self._steps not in (_FIRST_MEASURED, _LAST_MEASURED):
            return
        # reading a figure waits for an asynchronous device, here and nowhere else
        pl_module.step_loss.item()
        now = time.perf_counter()
        if self._steps == _FIRST_MEASURED:
            self._start = now
            return
        seconds_per_step = (now - self._start) / (_LAST_MEASURED - _FIRST_MEASURED)
        left = int(trainer.estimated_stepping_batches - trainer.global_step)
        estimate = timedelta(seconds=round(left * seconds_per_step))
        rank_zero_info(f"training will take about {estimate}: {left:,} steps of {seconds_per_step:.2f} s")
