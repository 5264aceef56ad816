"""A run that is killed, at any moment and any number of times, ends as if it never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afmoe.checkpoint.directory import checkpoint_step, damage, newest_checkpoint, whole_checkpoints
from tests.recipe.conftest import RECIPE, TINY
from tests.recipe.test_runs import assert_same_weights, weights

INTERVAL = 5
OVERRIDES = [
    *TINY,
    "trainer.max_steps=400",
    "trainer.val_check_interval=30",
    f"checkpoint.every_n_steps={INTERVAL}",
    "data.batch_size=1",
    "trainer.accumulate_grad_batches=2",
]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# a run that says "resume me", one that was ended by hand, one that died before it took the signals
CODES = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {75, -signal.SIGTERM},
    signal.SIGINT: {130, -signal.SIGINT},
}


def start(folder: Path, name: str, output: Path) -> subprocess.Popen:
    with output.open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, str(RECIPE), *OVERRIDES, f"run_name={name}"],
            cwd=folder,
            # one thread: a tiny model has nothing for two, and what waits for them takes the machine
            env=os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run_whole(folder: Path, name: str) -> str:
    """Run without a signal to the end; returns what was said."""
    output = folder / f"output-{name}.txt"
    assert start(folder, name, output).wait(timeout=400) == 0, output.read_text()
    return output.read_text()


def wait_for_the_moment(process: subprocess.Popen, run: Path, moments: random.Random) -> None:
    """A moment of the start-up, or one after a further checkpoint; the seed decides."""
    if moments.random() < 0.25:
        time.sleep(moments.uniform(0.5, 5.0))
        return
    before = newest_checkpoint(run)
    deadline = time.monotonic() + 100
    while newest_checkpoint(run) in (before, None) and time.monotonic() < deadline:
        if process.poll() is not None:
            return
        time.sleep(0.01)
    time.sleep(moments.uniform(0.0, 0.2))


def steps_done(run: Path) -> int:
    """The last step in the records, which are written step by step; the last line may be torn."""
    path = run / "steps.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def assert_nothing_is_half_written(run: Path) -> None:
    for path in run.glob("*.json"):
        json.loads(path.read_text())
    for step, path in whole_checkpoints(run):
        assert {file.name for file in path.iterdir()} == {
            "complete",
            "model.safetensors",
            "training_state.pt",
        }, step
        assert damage(path) is None, step
    unfinished = {path.name for path in (run / "checkpoints").glob("step-*")} - {
        path.name for _, path in whole_checkpoints(run)
    }
    assert not unfinished, "what was being written is hidden until it is whole"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_ended_at_twenty_moments_is_bitwise_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    run_whole(tmp_path, "whole")
    run = tmp_path / "outputs" / "killed"
    moments, saved = random.Random(7), 0
    for number in range(20):
        output = tmp_path / f"output-{number:02d}.txt"
        process = start(tmp_path, "killed", output)
        wait_for_the_moment(process, run, moments)
        sent = moments.choice(SIGNALS)
        assert process.poll() is None, output.read_text()
        process.send_signal(sent)
        code = process.wait(timeout=60)
        assert code in CODES[sent], output.read_text()
        if not run.exists():
            continue
        assert_nothing_is_half_written(run)
        newest = newest_checkpoint(run)
        before, saved = saved, 0 if newest is None else checkpoint_step(newest)
        # what the next start repeats: nothing where a signal came between two steps, and not before them
        repeated = max(steps_done(run) - saved, 0)
        allowed = 0 if sent != signal.SIGKILL and saved > before else INTERVAL
        assert repeated <= allowed, (sent, output.read_text())
        if sent != signal.SIGKILL:
            assert "Traceback" not in output.read_text()
    last = newest_checkpoint(run)
    assert last is not None
    assert f"continuing outputs/killed from step {checkpoint_step(last)}" in run_whole(tmp_path, "killed")
    assert_same_weights(weights(tmp_path / "outputs" / "whole"), weights(run))
    whole, resumed = (
        json.loads((tmp_path / "outputs" / name / "metrics.json").read_text()) for name in ("whole", "killed")
    )
    for name in ("train/loss", "train/tokens", "val/loss", "val/reverse_exact"):
        assert whole[name] == resumed[name], name
    # every step's loss, gradient norm, counts and rate
    assert (run / "steps.jsonl").read_bytes() == run.with_name("whole").joinpath("steps.jsonl").read_bytes()
    assert_nothing_is_half_written(run)
    assert not list((run / "checkpoints").glob(".*")), "leftovers are cleared"
