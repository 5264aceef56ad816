"""`scripts/benchmark_step.py`: the trainer's step beside a bare loop's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipe.conftest import TINY

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_step.py"


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )


def figures(*arguments: str) -> dict[str, Any]:
    done = benchmark("--json", "--cpu-time", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_it_times_both_in_turn():
    own = ("trainer.max_steps", "trainer.log_every", "data.num_train_rows")
    small = [text for text in TINY if not text.startswith(own)]
    # an epoch is three steps
    few_rows = "data.num_train_rows=8"
    found = figures("--steps", "7", *small, few_rows, "trainer.log_every_n_steps=2")
    assert found["blocks"] == 2
    assert set(found["milliseconds"]) == {"trainer", "bare loop"}
    assert all(value > 0 for value in found["milliseconds"].values())
    low, high = found["ratio_quartiles"]
    assert low <= found["ratio"] <= high


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--stepz", "3"), "unknown option --stepz"), (("--steps", "5"), "at least 30")]
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], said: str):
    done = benchmark(*arguments)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_trainer_costs_at_most_a_twentieth():
    # measured 1.036 with 256 tokens a step; with the 2,048 of the default less
    assert figures("--steps", "51")["ratio"] <= 1.05
