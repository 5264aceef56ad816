"""What became of a split's rows: the content of `data_report.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afmoe.data.rows import BadRow
from afmoe.errors import ConfigError

NUM_EXAMPLES = 3


@dataclass
class Dropped:
    count: int = 0
    first: list[str] = field(default_factory=list)
    """Origins of the first few."""


@dataclass
class SplitReport:
    split: str
    read: int = 0
    used: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason."""
    tokens: int = 0
    trainable_tokens: int = 0
    packs: int = 0
    efficiency: float = 0.0
    """Share of real tokens among those of the packs."""

    def drop(self, row: BadRow, *, stop: bool) -> None:
        """Count a bad row; with `stop` raise `ConfigError` for it."""
        if stop:
            raise ConfigError(f"bad row {row}; data.on_bad_row=drop leaves such rows out")
        dropped = self.dropped.setdefault(row.reason, Dropped())
        dropped.count += 1
        if len(dropped.first) < NUM_EXAMPLES:
            dropped.first.append(row.origin)

    def check_bad_fraction(self, max_bad_fraction: float) -> None:
        num_bad = sum(dropped.count for dropped in self.dropped.values())
        if num_bad > max_bad_fraction * self.read:
            reasons = "; ".join(
                f"{dropped.count} {reason} ({', '.join(dropped.first)})"
                for reason, dropped in self.dropped.items()
            )
            raise ConfigError(
                f"{num_bad} of {self.read} {self.split} rows are bad, more than data.max_bad_fraction="
                f"{max_bad_fraction}: {reasons}"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "used": self.used,
            "dropped": {
                reason: {"count": dropped.count, "first": dropped.first}
                for reason, dropped in self.dropped.items()
            },
            "tokens": self.tokens,
            "trainable_tokens": self.trainable_tokens,
            "packs": self.packs,
            "efficiency": round(self.efficiency, 4),
        }
