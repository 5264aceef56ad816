"""Lightning's own choice of a strategy."""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.registry import register


@register("trainer/strategy", "auto")
class AutoStrategy:
    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config) -> None:
        self.strategy = "auto"
