"""What every optimizer here can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from afmoe.config.checks import not_negative, positive
from afmoe.errors import ConfigError


@dataclass(kw_only=True)
class OptimOptions:
    """Base of an optimizer's `Config`: rates, decay, clipping, and which parameters are trained how."""

    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled; of matrices only (see `groups.py`)."""
    gradient_clip: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    freeze: list[str] = field(default_factory=list)
    """Patterns (`fnmatch`) of parameter names that are not trained."""
    rates: dict[str, float] | None = None
    """Pattern of parameter names -> factor on their learning rate; the first that matches counts."""

    def __post_init__(self) -> None:
        positive("optim.lr", self.lr)
        not_negative("optim.weight_decay", self.weight_decay)
        if self.gradient_clip is not None:
            positive("optim.gradient_clip", self.gradient_clip, ", or null for no clipping")
        if not isinstance(self.freeze, list) or not all(isinstance(one, str) for one in self.freeze):
            raise ConfigError(f"optim.freeze takes a list of patterns, got {self.freeze}")
        if not isinstance(self.rates, dict | None):
            raise ConfigError(f"optim.rates takes {{pattern: factor}}, or null, got {self.rates}")
        for pattern, factor in (self.rates or {}).items():
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not is_number or not 0 < factor < float("inf"):
                raise ConfigError(
                    f"optim.rates: the factor of {pattern} must be a positive number, got {factor}; "
                    "parameters that are not to be trained belong into optim.freeze"
                )


def check_betas(betas: list[float] | None) -> None:
    """Refuse what are not AdamW's two decay rates."""
    if betas is None or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optim.betas takes two numbers in [0, 1), got {betas}")


def check_eps(eps: float) -> None:
    """Refuse a term that keeps nothing from a division by zero."""
    positive("optim.eps", eps)
