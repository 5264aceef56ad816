"""Two runs' step records side by side: where they first differ, and by how much at most. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from afmoe.step_records import StepRecords

EXACT = ("counts",)
"""Figures that are equal or not: their difference has no size."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of one step."""

    step: int
    name: str
    layer: int | None
    """Layer with experts; None: the figure is of the whole model."""
    a: Any
    b: Any
    """The values; None where a run has no such figure."""
    relative: float | None
    """Of the larger value; None where there is no such size: checksums, what is absent, NaN and infinity."""

    def __str__(self) -> str:
        where = "" if self.layer is None else f" of layer {self.layer}"
        a, b = ("absent" if value is None else value for value in (self.a, self.b))
        size = "" if self.relative is None else f", relative difference {self.relative:.2g}"
        return f"step {self.step}: {self.name}{where}: {a} in A, {b} in B{size}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs have in common."""

    steps: list[int]
    """Those that both recorded."""
    missing: dict[str, list[int]]
    """Steps inside the common range that a run, `A` or `B`, did not record."""
    layers: tuple[list[int], list[int]]
    first: Difference | None
    """The first figure that is not bitwise the same."""
    largest: dict[str, Difference]
    """Of each figure that differs anywhere, where it does most."""

    @property
    def is_equal(self) -> bool:
        """Bitwise, in every figure of every step that both could have."""
        return self.first is None and not any(self.missing.values()) and self.layers[0] == self.layers[1]

    @property
    def equal_until(self) -> int:
        """The last step up to which everything is bitwise the same; 0: none is."""
        if self.first is None:
            return self.steps[-1]
        return max((step for step in self.steps if step < self.first.step), default=0)

    def is_within(self, tolerance: float) -> bool:
        """Whether no figure with a size differs by more, and none is absent."""
        if any(self.missing.values()) or self.layers[0] != self.layers[1]:
            return False
        return all(
            found.relative is not None and found.relative <= tolerance
            for name, found in self.largest.items()
            if name not in EXACT or None in (found.a, found.b)
        )


def compare(a: StepRecords, b: StepRecords) -> Comparison | None:
    """Compare the steps that both have; None when there is none."""
    steps = sorted(a.steps.keys() & b.steps.keys())
    if not steps:
        return None
    first: Difference | None = None
    largest: dict[str, Difference] = {}
    for step in steps:
        for found in _differences(step, a.steps[step], b.steps[step], a.layers):
            first = first or found
            if found.name not in largest or _size(found) > _size(largest[found.name]):
                largest[found.name] = found
    common = range(max(min(a.steps), min(b.steps)), min(max(a.steps), max(b.steps)) + 1)
    missing = {name: [step for step in common if step not in run.steps] for name, run in (("A", a), ("B", b))}
    return Comparison(steps=steps, missing=missing, layers=(a.layers, b.layers), first=first, largest=largest)


def _differences(step: int, a: dict[str, Any], b: dict[str, Any], layers: list[int]) -> Iterator[Difference]:
    for name in [*a, *(name for name in b if name not in a)]:
        one, other = a.get(name), b.get(name)
        if one == other:
            continue
        if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
            yield _difference(step, name, None, one, other)
            continue
        # the learning rate's list is one a parameter group
        places = layers if len(layers) == len(one) and name != "lr" else [None] * len(one)
        for layer, value, other_value in zip(places, one, other, strict=True):
            if value != other_value:
                yield _difference(step, name, layer, value, other_value)


def _difference(step: int, name: str, layer: int | None, a: Any, b: Any) -> Difference:
    return Difference(step=step, name=name, layer=layer, a=a, b=b, relative=_relative(name, a, b))


def _relative(name: str, a: Any, b: Any) -> float | None:
    if name in EXACT or a is None or b is None or isinstance(a, list) or isinstance(b, list):
        return None
    # "nan" and "inf" are strings in the file
    a, b = float(a), float(b)
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    return abs(a - b) / max(abs(a), abs(b))


def _size(found: Difference) -> float:
    return math.inf if found.relative is None else found.relative
