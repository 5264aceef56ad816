"""Sends tokens to experts in turn."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from afmoe.registry import register
from callbacks.moe_callback import MoeCallback


@register("callbacks", "balanced_routing")
class BalancedRouting(MoeCallback):
    """Forces perfect balance: real tokens take their experts in turn, the scores there still weigh the
    outputs.

    For benchmarks, and to measure what imbalance costs. It holds as long as the trainer runs; the model
    itself keeps its own routing.
    """

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        blocks = self.blocks(pl_module)
        for block in blocks:
            block.router.balanced = True
        self.announce(blocks, "routing forced to be balanced")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for block in self.blocks(pl_module):
            block.router.balanced = False
