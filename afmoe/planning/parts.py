"""The pieces that a plan is a sum of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

START, ALWAYS, BACKWARD, STEP = "start", "always", "backward", "step"
"""When memory is taken: before training, all through it, from forward to backward, while the optimizer
steps."""


@dataclass(frozen=True)
class Part:
    """Some bytes of one rank."""

    section: str
    name: str
    num_bytes: int
    when: str = ALWAYS
    on_host: bool = False


def peak(parts: Iterable[Part], *, on_host: bool = False) -> int:
    """The most that the parts take at once on the device, or in the host's memory."""
    totals: dict[str, int] = dict.fromkeys((START, ALWAYS, BACKWARD, STEP), 0)
    for part in parts:
        if part.on_host == on_host:
            totals[part.when] += part.num_bytes
    return max(totals[START], totals[ALWAYS] + max(totals[BACKWARD], totals[STEP]))


def total(parts: Iterable[Part], section: str | None = None, name: str | None = None) -> int:
    """Bytes of the parts of a section, or of those with a name."""
    return sum(
        part.num_bytes for part in parts if section in (None, part.section) and name in (None, part.name)
    )
