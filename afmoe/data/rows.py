"""What a data source hands on: a conversation (`Row`), or the reason why a row is none (`BadRow`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A checked conversation in the form that chat templates read."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    origin: str
    """`file:line`, for reports."""


@dataclass(frozen=True, slots=True)
class BadRow:
    reason: str
    """One of few fixed texts: bad rows are counted by it."""
    origin: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class RowError(ValueError):
    """Raised where a row turns out bad; whoever knows the origin makes it a `BadRow`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Source(Protocol):
    """A plugin of the group `data`, built with the run's seed: `registry.build(config, seed=seed)`."""

    @property
    def description(self) -> str:
        """What it is and how large, for the first screen."""
        ...

    @property
    def exact_match_metric(self) -> str | None:
        """Name of the metric "every answer token right" where that means something for this source."""
        ...

    def train_rows(self) -> Iterator[Row | BadRow]: ...

    def validation_rows(self) -> Iterator[Row | BadRow]: ...
