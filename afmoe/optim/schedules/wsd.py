"""Warm-up, stable, decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afmoe.errors import ConfigError
from afmoe.optim.schedules import DECAY_SHAPES, WarmupOptions, check_share, curve
from afmoe.registry import register


@register("scheduler", "wsd")
class WarmupStableDecay:
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): up linearly, constant, down at the end."""

    needs_length = True

    @dataclass(kw_only=True)
    class Config(WarmupOptions):
        decay_fraction: float = 0.4
        """Share of the run that decays."""
        decay_steps: int | None = None
        """Takes the place of `decay_fraction`."""
        decay_shape: str = "linear"
        """`linear`, `sqrt` or `cosine`, see `DECAY_SHAPES`."""
        minimum_ratio: float = 0.0
        """Last learning rate as a share of the peak."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_share("decay_fraction", self.decay_fraction)
            check_share("minimum_ratio", self.minimum_ratio)
            if self.decay_steps is not None and self.decay_steps < 0:
                raise ConfigError(f"scheduler.decay_steps must not be negative, got {self.decay_steps}")
            if self.decay_shape not in DECAY_SHAPES:
                raise ConfigError(
                    f"scheduler.decay_shape must be one of {', '.join(DECAY_SHAPES)}, got {self.decay_shape}"
                )

    def __init__(self, config: Config) -> None:
        self.config = config

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Step number to the factor on the peak learning rate, see `curve`."""
        config = self.config
        decay = config.decay_steps
        if decay is None:
            decay = int(total_steps * config.decay_fraction)
        return curve(
            total_steps,
            warmup=config.num_warmup_steps(total_steps),
            decay=decay,
            shape=config.decay_shape,
            minimum_ratio=config.minimum_ratio,
        )
