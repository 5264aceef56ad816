"""What the callbacks on MoE blocks share: finding the blocks and their counts, saying how many there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from afmoe.errors import ConfigError
from afmoe.model import iter_moe_blocks
from afmoe.moe.block import MoeBlock
from afmoe.moe.statistics import RoutingStatistics


class MoeCallback(Callback):
    """A callback that does something to every MoE block before training, in `prepare`."""

    name: str
    """Its option in the group `callbacks`; `register` sets it."""
    effect: str
    """What it does, for the line that says to how many blocks."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Callbacks that it cannot go with, and why."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # before the optimizer is made, before a strategy wraps the model and a precision casts it
        blocks = self.blocks(pl_module)
        for block in blocks:
            self.prepare(block)
        if stage == "fit":
            rank_zero_info(
                f"{self.name}: {self.effect} in {len(blocks)} MoE block{'s' if len(blocks) > 1 else ''}"
            )

    def prepare(self, block: MoeBlock) -> None:
        """Change one block; nothing here."""

    def blocks(self, module: LightningModule) -> list[MoeBlock]:
        """The model's MoE blocks. Raises `ConfigError` when it has none."""
        blocks = list(iter_moe_blocks(module))
        if not blocks:
            raise ConfigError(
                f"callbacks={self.name} needs a layer with experts, the model has none: every layer is dense "
                "(model.num_dense_layers)"
            )
        return blocks


def routing_statistics(module: nn.Module) -> list[RoutingStatistics]:
    """What each MoE block has counted since the optimizer step began: micro-batches summed, this rank's."""
    return [block.statistics for block in iter_moe_blocks(module) if block.statistics is not None]


def refuse_contradictions(callbacks: Iterable[Any]) -> None:
    """Raise `ConfigError` for two callbacks of which one undoes what the other does."""
    chosen = [callback for callback in callbacks if isinstance(callback, MoeCallback)]
    names = [callback.name for callback in chosen]
    for callback in chosen:
        for other, reason in callback.excludes.items():
            if other in names:
                raise ConfigError(f"callbacks={callback.name} does not go with {other}: {reason}")
