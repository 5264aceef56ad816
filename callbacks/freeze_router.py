"""Keeps routers as they are."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from afmoe.registry import register
from callbacks.moe_callback import MoeCallback


@register("callbacks", "freeze_router")
class FreezeRouter(MoeCallback):
    """Takes router weights out of the training; the selection bias is no parameter and stays anyway."""

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # before the optimizer is made and before a strategy wraps the model
        blocks = self.blocks(pl_module)
        for block in blocks:
            block.router.requires_grad_(False)
        self.announce(blocks, "router weights frozen")
