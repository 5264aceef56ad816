"""Warm-up and half a cosine down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afmoe.optim.schedules import WarmupOptions, check_share, curve
from afmoe.registry import register


@register("scheduler", "cosine")
class Cosine:
    """Up linearly, then down along half a cosine over the rest of the run (arXiv 1608.03983)."""

    needs_length = True

    @dataclass(kw_only=True)
    class Config(WarmupOptions):
        minimum_ratio: float = 0.1
        """Last learning rate as a share of the peak."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_share("minimum_ratio", self.minimum_ratio)

    def __init__(self, config: Config) -> None:
        self.config = config

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Step number to the factor on the peak learning rate, see `curve`."""
        warmup = self.config.num_warmup_steps(total_steps)
        return curve(
            total_steps,
            warmup=warmup,
            decay=total_steps - warmup,
            shape="cosine",
            minimum_ratio=self.config.minimum_ratio,
        )
