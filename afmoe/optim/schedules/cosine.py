"""Warm-up and half a cosine down."""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.optim.schedules import DecayOptions, WholeRunDecay
from afmoe.registry import register


@register("scheduler", "cosine")
class Cosine(WholeRunDecay):
    """Up linearly, then down along half a cosine over the rest of the run (arXiv 1608.03983)."""

    shape = "cosine"

    @dataclass(kw_only=True)
    class Config(DecayOptions):
        minimum_ratio: float = 0.1
