"""`steps.jsonl` of a run folder: figures of every optimizer step, to compare two runs bit by bit.

The first line says which layers have experts; each other one is a step:

    {"layers": [1, 2, 3]}
    {"step": 1, "loss": 5.5834274, "gradient_norm": 2.1, "lr": 0.0002, "tokens": 1961,
     "max_violation": [1.1, ...], "router_confidence": [0.26, ...], "counts": ["9e3779b97f4a7c15", ...]}

A list holds one figure a layer. fp32 figures are written with the fewest digits that give the same fp32 back;
what is no number is a string ("nan", "inf"). `counts` is a checksum of the layer's routed copies per expert:
one token moved to another expert changes it.

Lines are appended in one write, so a killed process leaves at most a torn last line, which is not read. No
torch in here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afmoe.checkpoint.atomic import disk_errors
from afmoe.errors import ConfigError

FILE = "steps.jsonl"


@dataclass(frozen=True)
class StepRecords:
    """What a file holds."""

    layers: list[int]
    """Indices of the layers with experts, to which the lists of figures belong."""
    steps: dict[int, dict[str, Any]]
    """Figures by step."""

    def until(self, last: int | None) -> StepRecords:
        """Without the steps after `last`; None: all."""
        steps = {step: figures for step, figures in self.steps.items() if last is None or step <= last}
        return StepRecords(self.layers, steps)


def read_records(path: Path) -> StepRecords:
    """Read all whole lines. Raises `ConfigError` when there is no such file or it is none of ours."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: no run of this recipe, or one that logged no step yet")
    layers: list[int] = []
    steps: dict[int, dict[str, Any]] = {}
    for number, (_, line) in enumerate(_whole_lines(path), start=1):
        try:
            values = json.loads(line)
            if number == 1:
                layers = list(values["layers"])
            else:
                # a step that was done again, after a kill, replaces what it was the first time
                steps[int(values.pop("step"))] = values
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is no line of step records: {line[:60]!r}") from error
    return StepRecords(layers, steps)


def keep_until(path: Path, step: int) -> None:
    """Cut off what is beyond `step`, where a resumed run continues, and a torn line."""
    if not path.exists():
        return
    end = 0
    for number, (line_end, line) in enumerate(_whole_lines(path), start=1):
        if number > 1 and json.loads(line)["step"] > step:
            break
        end = line_end
    with disk_errors(path):
        os.truncate(path, end if step > 0 else 0)


def append(path: Path, layers: list[int], records: Iterable[dict[str, Any]]) -> None:
    """Write records behind what the file holds, in one piece, and force them to the disk."""
    is_new = not path.exists() or path.stat().st_size == 0
    lines = ([{"layers": layers}] if is_new else []) + [_writable(record) for record in records]
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that ends, with the place where it does."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if line.endswith(b"\n"):
                yield end, line


def _writable(record: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nan(value) for name, value in record.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
