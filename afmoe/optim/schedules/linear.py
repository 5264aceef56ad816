"""Warm-up and a straight line down."""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.optim.schedules import DecayOptions, WholeRunDecay
from afmoe.registry import register


@register("scheduler", "linear")
class Linear(WholeRunDecay):
    """Up linearly, then down in a straight line over the rest of the run."""

    shape = "linear"

    @dataclass(kw_only=True)
    class Config(DecayOptions):
        pass
