"""How two ranks end when one of them cannot go on: both, at once, and one line says why."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from afmoe.checkpoint.directory import checkpoints_directory, damage
from afmoe.endings import Diverged, EndedByAnother, NotSaved, for_rank, is_agreed, is_peer_lost
from afmoe.finish import stopped_early
from afmoe.run import Run
from afmoe.signals import Interrupted
from tests.recipe.conftest import RECIPE, TINY, Result
from tests.recipe.test_runs import metrics

# MOMENT says what happens to which rank, in the step after the first checkpoint or in set-up
PROGRAM = """
    import importlib.util, os, resource, signal
    from dataclasses import dataclass
    from lightning.pytorch.callbacks import Callback
    from afmoe import register

    MOMENT = os.environ["MOMENT"]

    @register("callbacks", "trouble")
    class Trouble(Callback):
        @dataclass(kw_only=True)
        class Config:
            pass

        def __init__(self, config):
            pass

        def setup(self, trainer, pl_module, stage):
            if MOMENT == "set-up" and trainer.global_rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            step, rank = trainer.global_step, trainer.global_rank
            # smaller than any checkpoint, larger than what is logged; smaller than anything
            limit = {"full": 200_000, "brim": 1}.get(MOMENT)
            if limit is not None and rank == 0 and step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if MOMENT == "nan" and step == 2:
                pl_module.model.model.norm.weight.data.fill_(float("nan"))
            if MOMENT == "interrupt" and step == 2:
                os.kill(os.getpid(), signal.SIGINT)
            if MOMENT == "notice" and step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    # not by runpy: each rank starts what `sys.argv` says, which has to be this program
    spec = importlib.util.spec_from_file_location("sft", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
"""
TWO_RANKS = ["trainer.devices=2", "trainer.accelerator=cpu", "run_name=a", "faults.max_skipped_steps=2"]
DDP = ["trainer/strategy=ddp"]
EXPERT_PARALLEL = [
    "trainer/strategy=deepspeed",
    "trainer.strategy.ep_size=2",
    "trainer.strategy.timeout_seconds=60",
    "moe/dispatch=all_to_all",
]

Start = Callable[..., Result]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Two processes in which something happens at a moment."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.replace("RECIPE", repr(str(RECIPE)))))
    option = tmp_path / "conf" / "callbacks" / "trouble.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("trouble: {name: trouble}\n")
    given = [f"hydra.searchpath=[file://{option.parent.parent}]", "callbacks=[load_balance,trouble]"]

    def run(moment: str, *overrides: str) -> Result:
        done = subprocess.run(
            [sys.executable, str(program), *TINY, *TWO_RANKS, *given, *overrides],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MOMENT": moment},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        said = done.stdout + done.stderr
        assert "Traceback" not in said, said
        assert "onnection" not in said, said
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", [DDP, EXPERT_PARALLEL], ids=["ddp", "expert-parallel"])
def test_a_disk_that_fills_up_ends_every_rank_with_one_line(
    start: Start, tmp_path: Path, strategy: list[str]
) -> None:
    stopped = start("full", *strategy)
    assert stopped.code == 1
    errors = [line for line in stopped.err.splitlines() if "error" in line]
    assert len(errors) == 1, stopped.err
    assert "checkpoints/step-000004 could not be written: File too large" in errors[0]
    checkpoints = checkpoints_directory(tmp_path / "outputs" / "a")
    assert {path.name for path in checkpoints.iterdir()} == {"step-000002", "last"}
    assert damage(checkpoints / "step-000002") is None
    # said of the whole model, not of a rank's share
    assert "experts_decay: 6 tensors, 24,576 values" in stopped.out
    # the ranks still talked to each other
    assert metrics(tmp_path / "outputs" / "a")["status"] == "failed"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("moment", "code", "line"),
    [
        # rank 0 alone, in the middle of what the ranks do together
        ("brim", 1, "could not be written: File too large"),
        ("nan", 1, "error: 2 optimizer steps in a row, up to 4"),
        ("interrupt", 130, "SIGINT: the running step is finished and saved; once more ends it at once"),
        ("notice", 75, "SIGUSR1 came to another process of the run: it is saved and ends"),
        ("set-up", 75, "SIGTERM: the run ends here"),
    ],
)
def test_what_ends_a_run_is_said_once(start: Start, moment: str, code: int, line: str) -> None:
    stopped = start(moment, *DDP)
    assert stopped.code == code, stopped.err
    said = stopped.out + stopped.err
    assert said.count(line) == 1, said
    signals = [one for one in said.splitlines() if one.startswith(("SIG", "error:"))]
    assert len(signals) == 1, said


def test_the_ranks_that_a_process_started_end_before_it(tmp_path: Path) -> None:
    two_ranks = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False
    )
    launcher = two_ranks.strategy.launcher
    assert isinstance(launcher, _SubprocessScriptLauncher)
    with stopped_early(Run(tmp_path, None, 0, False), two_ranks):
        slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
        launcher.procs.append(slow)
    assert slow.returncode == 0


def test_ranks_that_agreed_end_with_one_code_and_one_error() -> None:
    error = Diverged("no number")
    assert for_rank(error, 0) is error
    quiet = for_rank(error, 1)
    assert isinstance(quiet, EndedByAnother)
    assert quiet.code == 0
    for one in (error, quiet, NotSaved("full"), Interrupted(15, 0, agreed=True)):
        assert is_agreed(one)
    for one in (EndedByAnother(agreed=False), Interrupted(15, 0), ValueError("of one rank")):
        assert not is_agreed(one)
    assert EndedByAnother(agreed=False).code == 1


def test_a_lost_rank_is_told_from_other_errors() -> None:
    gloo = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10964"
    assert is_peer_lost(RuntimeError(gloo))
    assert not is_peer_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_lost(ValueError(gloo))
