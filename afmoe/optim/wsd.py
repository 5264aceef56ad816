"""Learning rate that warms up, stays, and decays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afmoe.errors import ConfigError
from afmoe.registry import register


@register("scheduler", "wsd")
class WarmupStableDecay:
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): linear up, constant, linear down to
    `minimum_ratio`.
    """

    @dataclass(kw_only=True)
    class Config:
        warmup_steps: int = 20
        decay_fraction: float = 0.4
        """Share of the run that decays."""
        minimum_ratio: float = 0.0
        """Last learning rate as a share of the peak."""

        def __post_init__(self) -> None:
            if self.warmup_steps < 0:
                raise ConfigError(f"scheduler.warmup_steps must not be negative, got {self.warmup_steps}")
            if not 0 <= self.decay_fraction <= 1:
                raise ConfigError(f"scheduler.decay_fraction must lie in [0, 1], got {self.decay_fraction}")
            if not 0 <= self.minimum_ratio <= 1:
                raise ConfigError(f"scheduler.minimum_ratio must lie in [0, 1], got {self.minimum_ratio}")

    def __init__(self, config: Config) -> None:
        self.config = config

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Step number (0 before the first optimizer step) to the factor on the peak learning rate.

        The warm-up is cut to a tenth of a run that is too short for it. The last step of the run has the
        smallest positive factor; `minimum_ratio` is reached after it.
        """
        config = self.config
        warmup = min(config.warmup_steps, max(total_steps // 10, 1)) if config.warmup_steps else 0
        decay = int(total_steps * config.decay_fraction)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            left = total_steps - step
            if left >= decay:
                return 1.0
            return config.minimum_ratio + (1.0 - config.minimum_ratio) * max(left, 0) / decay

        return factor
