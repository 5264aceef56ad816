"""TensorBoard, in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afmoe.registry import register


@register("logger", "tensorboard")
class Tensorboard:
    """Lightning's `TensorBoardLogger` (`one_file.py`), writing to `<run folder>/tensorboard/`."""

    @dataclass(kw_only=True)
    class Config:
        enabled: bool = True

    def __init__(self, config: Config, *, directory: Path, first_step: int) -> None:
        """`first_step`: the step a resumed run continues at; what an interrupted one had logged beyond it is
        hidden.
        """
        self.logger = None
        if config.enabled:
            from afmoe.logger.one_file import OneFileLogger

            self.logger = OneFileLogger(
                save_dir=directory,
                name="",
                version="tensorboard",
                default_hp_metric=False,
                purge_step=first_step or None,
            )


def experiment(trainer: Any) -> Any | None:
    """TensorBoard's `SummaryWriter` of this trainer, for images and text; None on other ranks."""
    from lightning.pytorch.loggers import TensorBoardLogger

    if trainer.is_global_zero and isinstance(trainer.logger, TensorBoardLogger):
        return trainer.logger.experiment
    return None
