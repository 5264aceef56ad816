"""Logs the loss scale of fp16."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from afmoe.optim.loss_scaling import LossScaling


class LossScale(Callback):
    """Logs `train/loss_scale`; for `trainer.precision=16-mixed`. A scale that falls and falls is a fault."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.is_step_end(batch_idx) and trainer.global_step % trainer.log_every_n_steps == 0:
            assert isinstance(trainer.precision_plugin, LossScaling)
            assert trainer.precision_plugin.scaler is not None
            pl_module.log("train/loss_scale", trainer.precision_plugin.scaler.get_scale())
