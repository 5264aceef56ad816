"""What several ranks computed against what one process does."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from tests.parallel.launch import launch
from tests.parallel.worker import Case, run, write_cases

WORKER = Path(__file__).with_name("worker.py")


def train(cases: list[Case], folder: Path, *, world_size: int, timeout_seconds: float) -> None:
    """Run all `cases` in one launch of `world_size` processes."""
    folder.mkdir(exist_ok=True)
    write_cases(folder / "cases.json", cases)
    launch(
        WORKER,
        str(folder / "cases.json"),
        str(folder),
        world_size=world_size,
        timeout_seconds=timeout_seconds,
    )


def result(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=True)


def of_rank(folder: Path, name: str, rank: int, what: str = "weights") -> dict[str, Any]:
    return torch.load(folder / f"{name}.rank-{rank}.pt", weights_only=True)[what]


class OneProcess:
    """The same global batch in one plain process, computed once for each kind of case."""

    def __init__(self) -> None:
        self._done: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(self, case: Case) -> dict[str, Any]:
        alone = dataclasses.replace(
            case,
            name="one",
            world_size=1,
            strategy=None,
            batch_size=case.batch_size * case.accumulate * case.world_size,
            accumulate=1,
            steps=case.max_steps,
            resume_from=None,
            save_to=None,
        )
        key = tuple(str(value) for value in dataclasses.asdict(alone).values())
        if key not in self._done:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            self._done[key] = run(alone)[0]
            torch.set_num_threads(threads)
        return self._done[key]


def assert_equal_to_one(ours: dict[str, Any], one: dict[str, Any], optimizer: str) -> None:
    """The bars of expert parallelism; beside each the largest deviation measured over all cases."""
    first = len(one["losses"]) - len(ours["losses"])
    assert relative(ours["losses"], one["losses"][first:]) <= 1e-6  # 1.7e-7
    assert relative(ours["norms"], one["norms"][first:]) <= 1e-6  # 3.8e-7
    for mine, alone in zip(ours["counts"], one["counts"][first:], strict=True):
        assert torch.equal(mine, alone), "tokens per expert"
    if not first:
        assert ours["gradients"].keys() == one["gradients"].keys()
        for name, gradient in one["gradients"].items():
            difference = (ours["gradients"][name] - gradient).abs().max()
            assert difference <= 1e-6 * gradient.abs().max(), name  # 8.1e-7
    assert ours["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        difference = ours["weights"][name] - weight
        if optimizer == "sgd":
            assert difference.norm() <= 1e-6 * weight.norm(), name  # 3.3e-8
        else:
            # AdamW divides by the size of a gradient, however small that is
            assert difference.abs().max() <= 1e-5, name  # 1.1e-6


def relative(ours: list[float], theirs: list[float]) -> float:
    """Largest deviation; numbers that are not finite have to be so on both sides."""
    pairs = list(zip(ours, theirs, strict=True))
    assert all(math.isfinite(a) == math.isfinite(b) for a, b in pairs)
    return max(abs(a - b) / abs(b) for a, b in pairs if math.isfinite(b))
