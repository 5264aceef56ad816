"""The progress line."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class Progress(RichProgressBar):
    """Lightning's Rich progress bar, without the logger's version and without a number of epochs that has no
    end.
    """

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name.removeprefix("train/"): value for name, value in metrics.items()}

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {current_epoch}"
