"""Sends tokens to experts in turn."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from afmoe.model import iter_moe_blocks
from afmoe.moe.block import MoeBlock
from afmoe.registry import register
from callbacks.moe_callback import MoeCallback


@register("callbacks", "balanced_routing")
class BalancedRouting(MoeCallback):
    """Forces perfect balance: real tokens take their experts in turn, the scores there still weigh the
    outputs.

    For benchmarks, and to measure what imbalance costs. It holds as long as the trainer runs; the model
    itself keeps its own routing.
    """

    effect = "routing forced to be balanced"

    @dataclass(kw_only=True)
    class Config:
        pass

    def prepare(self, block: MoeBlock) -> None:
        block.router.balanced = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for block in iter_moe_blocks(pl_module):
            block.router.balanced = False
