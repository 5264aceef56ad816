"""Warm-up and a straight line down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afmoe.optim.schedules import WarmupOptions, check_share, curve
from afmoe.registry import register


@register("scheduler", "linear")
class Linear:
    """Up linearly, then down in a straight line over the rest of the run."""

    needs_length = True

    @dataclass(kw_only=True)
    class Config(WarmupOptions):
        minimum_ratio: float = 0.0
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
            shape="linear",
            minimum_ratio=self.config.minimum_ratio,
        )
