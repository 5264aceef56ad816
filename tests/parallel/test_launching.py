"""The recipe in several processes: started in each way, broken in each way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afmoe.checkpoint.directory import newest_checkpoint
from tests.recipe.conftest import RECIPE, TINY, Result

FAILING = Path(__file__).with_name("failing_recipe.py")
SHARED = [
    *TINY,
    "data.batch_size=1",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer/strategy=deepspeed",
    "trainer.strategy.ep_size=2",
    "moe/dispatch=all_to_all",
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(command: list[str], folder: Path, *, fault: str = "", timeout_seconds: float = 150) -> Result:
    """One command as people type it; all of its processes end with it."""
    root = str(RECIPE.parents[1])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "FAULT": fault}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert not processes_of(folder), "processes are left behind"
    return Result(process.returncode, out, err)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that work in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder and (process / "cmdline").read_bytes():
                found.append(process.name)
        # it ended meanwhile, or is another's
        except OSError:
            continue
    return found


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["lightning", "torchrun"])
def test_one_rank_that_raises_ends_all_with_its_trace(launcher: list[str], tmp_path: Path) -> None:
    result = run([*launcher, str(FAILING), *SHARED, "run_name=a"], tmp_path, fault="raise")
    assert result.code != 0
    assert "ValueError: the last rank broke in step 3" in result.out + result.err
    folder = tmp_path / "outputs" / "a"
    last_words = folder / "sft.rank-1.log"
    assert "the last rank broke in step 3" in last_words.read_text()
    # measured 5 s: Lightning looks after its processes that often, torchrun at once
    assert time.time() - last_words.stat().st_mtime < 60
    assert newest_checkpoint(folder) == folder / "checkpoints" / "step-000002"


def test_a_rank_that_dies_in_a_save_costs_that_save_only(tmp_path: Path) -> None:
    result = run([str(FAILING), *SHARED, "run_name=a"], tmp_path, fault="die-in-save")
    assert result.code != 0
    folder = tmp_path / "outputs" / "a"
    assert newest_checkpoint(folder) == folder / "checkpoints" / "step-000002"
    # one process goes on
    alone = [one for one in SHARED if "strategy" not in one and "devices" not in one]
    again = run([str(RECIPE), *alone, "run_name=a", "data.batch_size=2", "trainer.devices=1"], tmp_path)
    assert again.code == 0, again.err
    assert "continuing outputs/a from step 2" in again.out + again.err
    assert json.loads((folder / "metrics.json").read_text())["status"] == "finished"


def test_torchrun_and_lightning_and_a_sweep_and_one_process_agree(tmp_path: Path) -> None:
    alone = [*TINY, "data.batch_size=2", "trainer.accelerator=cpu", "trainer.devices=1"]
    for command in (
        [str(RECIPE), *alone, "run_name=alone"],
        [*TORCHRUN, str(RECIPE), *SHARED, "run_name=torchrun"],
        [str(RECIPE), "-m", *SHARED, "run_name=sweep", "seed=1234,5"],
    ):
        result = run(command, tmp_path)
        assert result.code == 0, result.err
    folders = [tmp_path / name for name in ("outputs/alone", "outputs/torchrun", "multirun/sweep/0")]
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    for other in metrics[1:]:
        for name in ("train/loss", "val/loss"):
            # measured 9e-8
            assert other[name] == pytest.approx(metrics[0][name], rel=1e-6)
        for name in ("train/tokens", "train/steps", "moe/max_violation"):
            assert other[name] == metrics[0][name]
    assert (tmp_path / "multirun/sweep/1/metrics.json").is_file()
    assert (tmp_path / "outputs/torchrun/sft.rank-1.log").is_file()
    # the other ranks hear of what rank 0 decides alone, too, and none waits for it
    again = [*TORCHRUN, str(RECIPE), *SHARED, "run_name=torchrun"]
    for command, said in (
        (again, "is finished at step 4"),
        ([*again, "dry_run=true"], "nothing was trained"),
    ):
        result = run(command, tmp_path)
        assert result.code == 0, result.err
        assert (result.out + result.err).count(said) == 1


def test_a_sweep_hands_a_signal_on_to_its_job_and_ends_as_that_does(tmp_path: Path) -> None:
    overrides = [*SHARED, "run_name=a", "seed=1,2", "trainer.max_steps=100000", "-m"]
    sweep = subprocess.Popen(
        [sys.executable, str(RECIPE), *overrides],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(RECIPE.parents[1]), "OMP_NUM_THREADS": "1"},
    )
    job = tmp_path / "multirun" / "a" / "0"
    try:
        while newest_checkpoint(job) is None:
            assert sweep.poll() is None
            time.sleep(0.1)
        # as `kill` does: to this process alone
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(60) == 75
        assert not processes_of(tmp_path), "processes are left behind"
    finally:
        for process in [str(sweep.pid), *processes_of(tmp_path)]:
            subprocess.run(["kill", "-9", process], check=False, capture_output=True)
    assert json.loads((job / "metrics.json").read_text())["status"] == "interrupted"
    assert not (tmp_path / "multirun" / "a" / "1").exists()
