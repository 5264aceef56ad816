"""A run that is killed, at any moment and any number of times, ends as if it never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from afmoe.checkpoint.directory import newest_checkpoint, whole_checkpoints
from tests.recipe.conftest import RECIPE, TINY, Result
from tests.recipe.test_runs import assert_same_weights, weights

OVERRIDES = [
    *TINY,
    "trainer.max_steps=120",
    "trainer.val_check_interval=30",
    "checkpoint.every_n_steps=5",
    "data.batch_size=1",
    "trainer.accumulate_grad_batches=2",
]


def start(folder: Path) -> subprocess.Popen:
    with open(folder / "output.txt", "a", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, str(RECIPE), *OVERRIDES, "run_name=killed"],
            cwd=folder,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def assert_nothing_is_half_written(run: Path) -> None:
    for path in run.glob("*.json"):
        json.loads(path.read_text())
    for step, path in whole_checkpoints(run):
        assert {file.name for file in path.iterdir()} == {
            "complete",
            "model.safetensors",
            "training_state.pt",
        }, step
    unfinished = {path.name for path in (run / "checkpoints").glob("step-*")} - {
        path.name for _, path in whole_checkpoints(run)
    }
    assert not unfinished, "what was being written is hidden until it is whole"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_five_moments_ends_bitwise_like_the_undisturbed_one(
    tmp_path: Path, sft_process: Callable[..., Result]
) -> None:
    assert sft_process(*OVERRIDES, "run_name=whole", timeout=300).code == 0
    run = tmp_path / "outputs" / "killed"
    moments = random.Random(7)
    killed = 0
    while killed < 5:
        before = newest_checkpoint(run)
        process = start(tmp_path)
        # the first kill comes at any moment of the start-up, the others once a further checkpoint is there
        deadline = time.monotonic() + (moments.uniform(1, 10) if killed == 0 else 120)
        while time.monotonic() < deadline and process.poll() is None:
            if killed > 0 and newest_checkpoint(run) not in (before, None):
                break
            time.sleep(0.02)
        if killed > 0:
            time.sleep(moments.uniform(0.0, 0.4))
        assert process.poll() is None, (tmp_path / "output.txt").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        if run.exists():
            assert_nothing_is_half_written(run)
    last = newest_checkpoint(run)
    assert last is not None
    result = sft_process(*OVERRIDES, "run_name=killed", timeout=300)
    assert result.code == 0, result.err
    assert f"continuing outputs/killed from step {int(last.name[5:])}" in result.out + result.err
    assert_same_weights(weights(tmp_path / "outputs" / "whole"), weights(run))
    whole, resumed = (
        json.loads((tmp_path / "outputs" / name / "metrics.json").read_text()) for name in ("whole", "killed")
    )
    for name in ("train/loss", "train/tokens", "val/loss", "val/reverse_exact"):
        assert whole[name] == resumed[name], name
    assert_nothing_is_half_written(run)
    assert not list((run / "checkpoints").glob(".*")), "leftovers are cleared"
