"""Learning rate over a run: up linearly, constant, down in one of three shapes.

Every schedule of ours is this one curve with other lengths; each is a plugin of the group `scheduler`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from afmoe.errors import ConfigError

log = logging.getLogger(__name__)

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    # "1-sqrt", Haegele et al., arXiv 2405.18392: falls fast at first, and ended lower than linear there
    "sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
    "cosine": lambda left: 0.5 * (1.0 - math.cos(math.pi * left)),
}
"""Share of the decay that is left (1 at its start, 0 at its end) -> share of the way to the minimum that is
left."""


@dataclass(kw_only=True)
class WarmupOptions:
    """Base of a schedule's `Config`: how it begins."""

    warmup_steps: int = 20
    warmup_fraction: float | None = None
    """Share of the run; takes the place of `warmup_steps`."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"scheduler.warmup_steps must not be negative, got {self.warmup_steps}")
        check_share("warmup_fraction", self.warmup_fraction)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up. A number of steps is cut to a tenth of the run, which is said unless it is the
        default.
        """
        if self.warmup_fraction is not None:
            return round(total_steps * self.warmup_fraction)
        steps = min(self.warmup_steps, max(total_steps // 10, 1))
        if steps < self.warmup_steps != type(self).warmup_steps:
            log.warning(
                "scheduler.warmup_steps=%d is more than a tenth of the run's %d steps and cut to %d; "
                "scheduler.warmup_fraction takes any share",
                self.warmup_steps,
                total_steps,
                steps,
            )
        return steps


@dataclass(kw_only=True)
class DecayOptions(WarmupOptions):
    """Base of the `Config` of a schedule that decays over the whole run."""

    minimum_ratio: float = 0.0
    """Last learning rate as a share of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("minimum_ratio", self.minimum_ratio)


class WholeRunDecay:
    """Base of a plugin whose rate falls from the end of the warm-up to the end of the run."""

    needs_length = True
    shape: ClassVar[str]
    """Key of `DECAY_SHAPES`."""

    def __init__(self, config: DecayOptions) -> None:
        self.config = config

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Step number to the factor on the peak learning rate, see `curve`."""
        warmup = self.config.num_warmup_steps(total_steps)
        return curve(
            total_steps,
            warmup=warmup,
            decay=total_steps - warmup,
            shape=self.shape,
            minimum_ratio=self.config.minimum_ratio,
        )


def refuse_without_length(scheduler: Any) -> None:
    """Raise `ConfigError` for a run without an end in steps, when this schedule has to know one."""
    if scheduler.needs_length:
        raise ConfigError(
            f"scheduler={scheduler.name} needs the length of the run; set trainer.max_steps, "
            "trainer.max_epochs or trainer.max_tokens, or choose scheduler=constant"
        )


def check_share(name: str, value: float | None) -> None:
    """Refuse what is no share from 0 to 1; None is fine."""
    if value is not None and not 0 <= value <= 1:
        raise ConfigError(f"scheduler.{name} must lie in [0, 1], got {value}")


def curve(
    total_steps: int, *, warmup: int, decay: int, shape: str = "linear", minimum_ratio: float = 0.0
) -> Callable[[int], float]:
    """Step number (0 before the first optimizer step) to the factor on the peak learning rate.

    `warmup` steps up, `decay` steps down at the end, `minimum_ratio` of the peak is reached after the last
    step, which has the smallest factor above it.
    """
    decay_shape = DECAY_SHAPES[shape]

    # a plain function: torch would keep the fields of any other callable in checkpoints and put them back
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        left = total_steps - step
        if left >= decay or decay == 0:
            return 1.0
        return minimum_ratio + (1.0 - minimum_ratio) * decay_shape(max(left, 0) / decay)

    return factor
