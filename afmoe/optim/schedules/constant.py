"""Warm-up, then one rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afmoe.optim.schedules import WarmupOptions, curve
from afmoe.registry import register


@register("scheduler", "constant")
class Constant:
    """Up linearly, then constant: the one schedule for a run whose length is not known."""

    @dataclass(kw_only=True)
    class Config(WarmupOptions):
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs_length(self) -> bool:
        return self.config.warmup_fraction is not None

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Step number to the factor on the peak learning rate, see `curve`."""
        return curve(total_steps, warmup=self.config.num_warmup_steps(total_steps), decay=0)
