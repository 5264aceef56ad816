"""Balances experts without a loss: moves each router's selection bias against the load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from afmoe.config.checks import one_of, positive
from afmoe.errors import ConfigError
from afmoe.registry import register
from callbacks.moe_callback import MoeCallback, routing_statistics


@register("callbacks", "selection_bias")
class SelectionBias(MoeCallback):
    """After each optimizer step: experts that got more than their share are chosen less, the others more.

    The bias decides which experts are chosen and never weighs their outputs, so no gradient is disturbed. It
    follows the counts of the whole step, all ranks and micro-batches, and is the same on every rank. A step
    that was skipped moves nothing. Nothing is read back from the device.
    """

    effect = "selection bias trained"
    excludes: ClassVar[Mapping[str, str]] = {
        "freeze_router": (
            "it keeps routers as they are; to keep the gates alone use "
            "'optim.freeze=[\"*.router.gate.weight\"]'"
        ),
        "balanced_routing": "tokens are then sent to experts in turn and the bias decides nothing",
    }

    @dataclass(kw_only=True)
    class Config:
        rule: str = "sign"
        """`sign` (arXiv 2408.15664) or `smebu` (arXiv 2602.17004)."""
        rate: float = 1e-3
        """Largest change in a step."""
        centre: bool = True
        """Take the mean off each change, so that biases do not drift together."""
        kappa: float = 2.0
        """SMEBU: how soon a deviation counts in full."""
        momentum: float = 0.5
        """SMEBU: share of the last change in the next."""

        def __post_init__(self) -> None:
            one_of("callbacks.selection_bias.rule", self.rule, ("sign", "smebu"))
            for name in ("rate", "kappa"):
                positive(f"callbacks.selection_bias.{name}", getattr(self, name))
            if not 0 <= self.momentum < 1:
                raise ConfigError(
                    f"callbacks.selection_bias.momentum must lie in [0, 1), got {self.momentum}"
                )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.momentum_LE: Tensor | None = None
        """SMEBU's running change, one row a MoE block; None before the first step."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        blocks = self.blocks(pl_module)
        # a new tensor, which the reduction may overwrite
        counts_LE = torch.stack([counted.counts_E for counted in routing_statistics(pl_module)])
        counts_LE = trainer.strategy.reduce(counts_LE, reduce_op="sum")
        for block, change_E in zip(blocks, self.changes(counts_LE, pl_module.skipped_step), strict=True):
            block.router.selection_bias += change_E

    @torch.no_grad()
    def changes(self, counts_LE: Tensor, skipped: Tensor | None = None) -> Tensor:
        """What is added to the biases after a step with these counts, fp32.

        `skipped`: fp32 scalar, 1 where the step did not count; None: it did.
        """
        config = self.config
        counts_LE = counts_LE.double()
        share_L1 = counts_LE.mean(-1, keepdim=True)
        if config.rule == "sign":
            change_LE = torch.sign(share_L1 - counts_LE)
        else:
            change_LE = torch.tanh(config.kappa * (share_L1 - counts_LE) / share_L1.clamp(min=1e-20))
        if config.centre:
            change_LE = change_LE - change_LE.mean(-1, keepdim=True)
        change_LE = (config.rate * change_LE).float()
        if config.rule == "smebu":
            before_LE = torch.zeros_like(change_LE) if self.momentum_LE is None else self.momentum_LE
            before_LE = before_LE.to(change_LE.device)
            change_LE = torch.lerp(change_LE, before_LE, config.momentum)
            self.momentum_LE = (
                change_LE if skipped is None else torch.where(skipped > 0, before_LE, change_LE)
            )
        return change_LE if skipped is None else torch.where(skipped > 0, 0.0, change_LE)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.momentum_LE is None else {"momentum_LE": self.momentum_LE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.momentum_LE = state_dict.get("momentum_LE")
