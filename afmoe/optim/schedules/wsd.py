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
            shares = (self.warmup_fraction or 0) + (self.decay_fraction if self.decay_steps is None else 0)
            if shares > 1:
                raise ConfigError(
                    f"scheduler.warmup_fraction={self.warmup_fraction} and scheduler.decay_fraction="
                    f"{self.decay_fraction} together are more than the run; lower one of them"
                )
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
        warmup = config.num_warmup_steps(total_steps)
        room = total_steps - warmup
        if config.decay_steps is not None and config.decay_steps > room:
            raise ConfigError(
                f"scheduler.decay_steps={config.decay_steps} does not fit into the run: {room} of its "
                f"{total_steps} steps follow the warm-up; use at most that, or scheduler.decay_fraction"
            )
        decay = config.decay_steps
        if decay is None:
            # the default warm-up and a decay over the whole run are no contradiction
            decay = min(int(total_steps * config.decay_fraction), room)
        return curve(
            total_steps,
            warmup=warmup,
            decay=decay,
            shape=config.decay_shape,
            minimum_ratio=config.minimum_ratio,
        )
