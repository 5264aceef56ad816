"""Compare two runs step by step: bitwise equal until step n, or the first figure that differs.

    python scripts/compare_runs.py outputs/a outputs/b
    python scripts/compare_runs.py outputs/ep1 outputs/ep2 --tolerance 1e-6

A and B are run folders (or their `steps.jsonl`): loss, gradient norm, learning rate, tokens, and of each
layer with experts overload, confidence and a checksum of the routing counts. Steps that only one run has come
before or after the others and are named, not judged; those after --until are left out: two runs whose sums
were rounded otherwise part for good once a token goes to another expert. Exit code 0: equal, or within the
tolerance; 1: not; 2: nothing to compare. With --tolerance the checksums, which have no size, are shown and
not judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from afmoe.errors import ConfigError, ScriptParser, script_errors
from afmoe.resume import flatten
from afmoe.run_difference import Comparison, compare
from afmoe.step_records import FILE, StepRecords, read_records

_LISTED_KEYS = 8
# where a run lies and how it was started says nothing about it
_NOT_SETTINGS = ("run_name", "resume", "overwrite", "model.explicit", "dry_run")


def main() -> int:
    options = read_options()
    a, b = read_records(records_of(options.a)), read_records(records_of(options.b))
    comparison = compare(a.until(options.until), b.until(options.until))
    if comparison is None:
        raise ConfigError(
            f"no step in common: {options.a} has {spelt_range(a)}, {options.b} has {spelt_range(b)}"
        )
    settings = changed_settings(options.a, options.b)
    agrees = comparison.is_equal if options.tolerance is None else comparison.is_within(options.tolerance)
    if options.json:
        print(json.dumps(as_dict(comparison, settings, options.tolerance, agrees), indent=2))
    else:
        for name, folder, records in (("A", options.a, a), ("B", options.b, b)):
            print(f"{name}  {folder}: {spelt_range(records)}")
        print("\n".join(report(comparison, settings, options.tolerance, agrees)))
    return 0 if agrees else 1


def read_options() -> argparse.Namespace:
    parser = ScriptParser(
        description=(__doc__ or "").split("\n\n", 1)[0], epilog=(__doc__ or "").rpartition("\n\n")[2]
    )
    parser.add_argument("a", type=Path, metavar="A", help="a run folder")
    parser.add_argument("b", type=Path, metavar="B", help="another")
    parser.add_argument(
        "--tolerance", type=tolerance, help="largest relative difference that passes; without it: none at all"
    )
    parser.add_argument("--until", type=int, metavar="STEP", help="compare no steps after this one")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser.parse_args()


def tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must lie in [0, 1), got {text}")
    return value


def records_of(path: Path) -> Path:
    return path / FILE if path.is_dir() else path


def changed_settings(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    """Keys of the two `config.yaml` that differ, where both are there."""
    stored = []
    for path in (a, b):
        file = records_of(path).with_name("config.yaml")
        if not file.is_file():
            return {}
        try:
            stored.append(flatten(yaml.safe_load(file.read_text(encoding="utf-8"))))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: it is torn or was edited") from error
    one, other = stored
    return {
        key: (one.get(key, "absent"), other.get(key, "absent"))
        for key in [*one, *(key for key in other if key not in one)]
        if one.get(key, "absent") != other.get(key, "absent") and not key.startswith(_NOT_SETTINGS)
    }


def report(
    comparison: Comparison, settings: dict[str, tuple[Any, Any]], limit: float | None, agrees: bool
) -> list[str]:
    """What a person reads."""
    lines = []
    if settings:
        listed = [f"{key}: {a} -> {b}" for key, (a, b) in list(settings.items())[:_LISTED_KEYS]]
        more = f"; and {len(settings) - _LISTED_KEYS} more" if len(settings) > _LISTED_KEYS else ""
        lines.append(f"settings that differ: {'; '.join(listed)}{more}")
    for name, steps in comparison.missing.items():
        if steps:
            lines.append(f"{name} has no record of {len(steps)} steps, the first of them step {steps[0]}")
    if comparison.layers[0] != comparison.layers[1]:
        a, b = comparison.layers
        lines.append(f"layers with experts differ: {a} in A, {b} in B")
    steps = comparison.steps
    if comparison.first is None:
        lines.append(f"bitwise equal until step {steps[-1]} (all {len(steps)} steps that both have)")
    else:
        until = comparison.equal_until
        lines.append(f"bitwise equal until step {until}" if until else "nothing is bitwise equal")
        lines.append(f"first difference: {comparison.first}")
        lines.append(f"largest relative differences of {len(steps)} steps:")
        for name, found in comparison.largest.items():
            size = "differ" if found.relative is None else f"{found.relative:.2e}"
            layer = "" if found.layer is None else f", layer {found.layer}"
            lines.append(f"  {name:<18} {size}  (step {found.step}{layer})")
    if limit is not None:
        lines.append(f"{'within' if agrees else 'beyond'} the tolerance of {limit:g}")
    return lines


def as_dict(
    comparison: Comparison, settings: dict[str, tuple[Any, Any]], limit: float | None, agrees: bool
) -> dict[str, Any]:
    first = comparison.first
    return {
        "agrees": agrees,
        "tolerance": limit,
        "steps": len(comparison.steps),
        "first_step": comparison.steps[0],
        "last_step": comparison.steps[-1],
        "equal_until": comparison.equal_until,
        "missing": comparison.missing,
        "first_difference": None if first is None else dataclasses.asdict(first),
        "largest": {name: dataclasses.asdict(found) for name, found in comparison.largest.items()},
        "settings": {key: list(values) for key, values in settings.items()},
    }


def spelt_range(records: StepRecords) -> str:
    if not records.steps:
        return "no steps"
    return f"steps {min(records.steps)} to {max(records.steps)}"


if __name__ == "__main__":
    with script_errors(exit_code=2):
        raise SystemExit(main())
