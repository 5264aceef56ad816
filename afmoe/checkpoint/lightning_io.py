"""Run checkpoints as a plugin of Lightning's Trainer; `run.py` itself needs no Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from afmoe.checkpoint.atomic import remove_directory
from afmoe.checkpoint.run import read_checkpoint, take_part, write_checkpoint
from afmoe.endings import NotSaved
from afmoe.errors import ConfigError, MachineError


class RunCheckpointIO(CheckpointIO):
    """Makes `trainer.save_checkpoint(path)` and `trainer.fit(ckpt_path=path)` use this format."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise ConfigError("a run checkpoint is a local directory: storage_options has no meaning for it")
        try:
            write_checkpoint(path, checkpoint)
        except MachineError as error:
            # the other ranks make what is deferred, and only together
            take_part(checkpoint)
            raise NotSaved(str(error)) from error

    def take_part(self, checkpoint: dict[str, Any]) -> None:
        """Instead of `save_checkpoint` on the ranks that do not write, where the state is deferred."""
        take_part(checkpoint)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # tensors come to the CPU, the strategy places them; weights_only is how this format is always read
        return read_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:
        remove_directory(Path(path))
