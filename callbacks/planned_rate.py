"""The learning rate that is planned, as a curve over the whole run, before its first step."""

from __future__ import annotations

import math
import sys
from typing import Any

from lightning.pytorch.callbacks import Callback

from afmoe.logger.tensorboard import experiment

_MOST_POINTS = 1000


class PlannedRate(Callback):
    """Writes `plan/lr`, the course of `optim.lr`, to TensorBoard when training starts.

    What comes after the step that a resumed run continues at, TensorBoard forgets; that part is written anew,
    as the run's length may have changed.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        writer = experiment(trainer)
        factor, total_steps = pl_module.planned_rates
        # a run without an end has no curve
        if writer is None or total_steps == sys.maxsize:
            return
        stride = math.ceil(total_steps / _MOST_POINTS)
        for step in range(total_steps):
            is_point = step % stride == 0 or step == total_steps - 1
            if is_point and step >= trainer.global_step:
                writer.add_scalar("plan/lr", pl_module.optim.config.lr * factor(step), step)
