"""What the callbacks on MoE blocks share: finding the blocks, saying how many there are, refusing none."""

from __future__ import annotations

import logging

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from afmoe.errors import ConfigError
from afmoe.model import iter_moe_blocks
from afmoe.moe.block import MoeBlock

log = logging.getLogger(__name__)


class MoeCallback(Callback):
    """A callback with the registered name `name` that acts on every MoE block."""

    name: str

    def blocks(self, module: LightningModule) -> list[MoeBlock]:
        """The model's MoE blocks. Raises `ConfigError` when it has none."""
        blocks = list(iter_moe_blocks(module))
        if not blocks:
            raise ConfigError(
                f"callbacks={self.name} needs a layer with experts, the model has none: every layer is dense "
                "(model.num_dense_layers)"
            )
        return blocks

    def announce(self, blocks: list[MoeBlock], what: str) -> None:
        rank_zero_info(f"{self.name}: {what} in {len(blocks)} MoE block{'s' if len(blocks) > 1 else ''}")
