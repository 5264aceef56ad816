"""Keeps routers as they are."""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.moe.block import MoeBlock
from afmoe.registry import register
from callbacks.moe_callback import MoeCallback


@register("callbacks", "freeze_router")
class FreezeRouter(MoeCallback):
    """Takes router weights out of the training; the selection bias is no parameter and stays anyway."""

    effect = "router weights frozen"
    frozen = "*.router.*"
    """Pattern of the names of the parameters that it freezes."""

    @dataclass(kw_only=True)
    class Config:
        pass

    def prepare(self, block: MoeBlock) -> None:
        block.router.requires_grad_(False)
