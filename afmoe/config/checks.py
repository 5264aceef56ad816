"""Bounds of single fields. Each raises `ConfigError` with the name, the value and the bound."""

from __future__ import annotations

import math
from typing import Any

from afmoe.errors import ConfigError


def at_least(name: str, value: int, bound: int) -> None:
    """Refuse a number below `bound`."""
    if value < bound:
        raise ConfigError(f"{name} must be at least {bound}, got {value}")


def positive(name: str, value: float, remedy: str = "") -> None:
    """Refuse zero, what lies below it, NaN and infinity."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be positive and finite{remedy}, got {value}")


def not_negative(name: str, value: float) -> None:
    """Refuse what lies below zero, NaN and infinity."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number from 0, got {value}")


def one_of(name: str, value: str | None, valid: tuple[str | None, ...]) -> None:
    """Refuse what is not listed."""
    if value not in valid:
        listed = ", ".join("null" if one is None else one for one in valid)
        raise ConfigError(f"{name} must be one of {listed}, got {value}")


def share_or_number(name: str, value: Any, *, zero: bool = True) -> None:
    """Lightning's two readings: a whole number of batches, or with a decimal point a share from 0 to 1."""
    if value is None:
        return
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_share = isinstance(value, float) and 0.0 <= value <= 1.0
    if not (is_number or is_share) or (value == 0 and not zero):
        bound = "0" if zero else "1"
        raise ConfigError(
            f"{name} takes a whole number from {bound} or a share up to 1.0, or null, got {value}"
        )
