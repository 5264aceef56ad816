"""SIGTERM, SIGUSR1 and SIGINT at every stage of a run: it ends in good order and continues bit for bit.

A callback sends this process real signals, so that the moment is known.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from afmoe import register
from afmoe.checkpoint.directory import checkpoint_step, newest_checkpoint
from afmoe.signals import Interrupted, stop_signals
from tests.recipe.conftest import RECIPE, TINY, Result
from tests.recipe.test_runs import assert_same_weights, metrics, weights

Run = Callable[..., Result]

LENGTH = [
    *TINY,
    "trainer.max_steps=8",
    "trainer.accumulate_grad_batches=2",
    "data.batch_size=1",
    # every fourth step, and one at the end
    "trainer.val_check_interval=8",
    "checkpoint.every_n_steps=100",
]


@register("callbacks", "ring")
class Ring(Callback):
    """Sends a signal to this process at one moment."""

    @dataclass(kw_only=True)
    class Config:
        pass

    moment: str = ""
    number: int = signal.SIGTERM

    def __init__(self, config: Config) -> None:
        pass

    def ring(self, moment: str) -> None:
        if Ring.moment == moment:
            Ring.moment = ""
            os.kill(os.getpid(), Ring.number)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.ring(f"set-up for {trainer.state.fn.value}")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.is_step_end(batch_idx):
            self.ring(f"step {trainer.global_step}")

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.ring(f"{trainer.state.fn.value} at step {trainer.global_step}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ring("end")


@pytest.fixture
def ringing(sft: Run, tmp_path: Path) -> Callable[..., Result]:
    """Run until a signal at a moment."""
    option = tmp_path / "conf" / "callbacks" / "ring.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("ring: {name: ring}\n")
    given = [f"hydra.searchpath=[file://{option.parent.parent}]", "callbacks=[load_balance,ring]"]

    def run(*overrides: str, moment: str = "", number: int = signal.SIGTERM) -> Result:
        Ring.moment, Ring.number = moment, number
        return sft(*LENGTH, *given, *overrides)

    return run


def assert_same_run(whole: Path, run: Path) -> None:
    assert_same_weights(weights(whole), weights(run))
    one, other = metrics(whole), metrics(run)
    for name in ("status", "stopped_by", "train/loss", "train/tokens", "val/loss", "moe/max_violation"):
        assert one[name] == other[name], name
    steps = [
        {event.step for event in EventAccumulator(str(path / "tensorboard")).Reload().Scalars("val/loss")}
        for path in (whole, run)
    ]
    assert steps[0] == steps[1], "a validation is missing"


def assert_stopped(stopped: Result, run: Path, code: int, saved: int | None) -> None:
    assert stopped.code == code, stopped.err
    assert "Traceback" not in stopped.err
    newest = newest_checkpoint(run)
    assert saved == (None if newest is None else checkpoint_step(newest))
    values = metrics(run)
    assert values["status"] == "interrupted"
    assert values["train/steps"] == (saved or 0)


def test_signals_at_every_stage_save_what_was_done_and_the_run_ends_bitwise_the_undisturbed_one(
    ringing: Run, tmp_path: Path
) -> None:
    run = tmp_path / "outputs" / "a"
    for moment, number, code, saved in (
        ("set-up for fit", signal.SIGINT, 130, None),
        # the step that was begun is finished
        ("step 1", signal.SIGTERM, 75, 2),
        # inside validation, which is done again
        ("fit at step 4", signal.SIGUSR1, 75, 4),
        ("step 5", signal.SIGINT, 130, 6),
    ):
        assert_stopped(ringing("run_name=a", moment=moment, number=number), run, code, saved)
    resumed = ringing("run_name=a")
    assert "continuing outputs/a from step 6" in resumed.out + resumed.err
    assert ringing("run_name=whole").code == 0
    assert_same_run(tmp_path / "outputs" / "whole", run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number", "code", "saved"),
    [
        ("step 2", signal.SIGUSR1, 75, 3),
        # validation follows the step: it is left to the next start
        ("step 3", signal.SIGTERM, 75, 4),
        ("fit at step 0", signal.SIGTERM, 75, None),
        ("set-up for fit", signal.SIGTERM, 75, None),
        ("end", signal.SIGTERM, 75, 8),
    ],
)
def test_a_signal_at_one_stage_leaves_a_run_that_continues_bitwise(
    ringing: Run, tmp_path: Path, moment: str, number: int, code: int, saved: int | None
) -> None:
    run = tmp_path / "outputs" / "a"
    assert_stopped(ringing("run_name=a", moment=moment, number=number), run, code, saved)
    assert ringing("run_name=a").code == 0
    assert ringing("run_name=whole").code == 0
    assert_same_run(tmp_path / "outputs" / "whole", run)


@pytest.mark.slow
def test_a_signal_in_the_last_validation_leaves_a_run_that_the_next_start_ends(
    ringing: Run, tmp_path: Path
) -> None:
    shorter = ["run_name=a", "trainer.max_steps=6"]
    stopped = ringing(*shorter, moment="validate at step 6")
    assert stopped.code == 75
    assert metrics(tmp_path / "outputs" / "a")["status"] == "interrupted"
    assert not (tmp_path / "outputs" / "a" / "export").exists()
    assert ringing(*shorter).code == 0
    assert metrics(tmp_path / "outputs" / "a")["status"] == "finished"
    assert (tmp_path / "outputs" / "a" / "export").exists()


def test_handlers_are_given_back(ringing: Run) -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    ringing("run_name=a", moment="set-up for fit")
    assert [signal.getsignal(number) for number in numbers] == before


def test_the_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time
        from afmoe.signals import stop_signals
        with stop_signals(0) as signals:
            signals.waits = True
            os.kill(os.getpid(), signal.SIGINT)
            print(signals.received, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("still here", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "2\n"


def test_a_dead_process_holds_no_lock(tmp_path: Path, sft: Run) -> None:
    """The holder is killed, so that it cannot give anything back."""
    code = """
        import fcntl, time
        file = open(".lock", "a+")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("held", flush=True)
        time.sleep(60)
    """
    folder = tmp_path / "outputs" / "a"
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        refused = sft(*TINY, "run_name=a")
        assert refused.code == 1
        assert "outputs/a is in use by" in refused.err
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    result = sft(*TINY, "run_name=a", "trainer.max_steps=1", "export.enabled=false")
    assert result.code == 0, result.err


def test_a_signal_in_an_import_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ asks for imports too, and an exception in one of those aborts the process."""
    module = """
        import os, signal, time
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10):
            time.sleep(0.01)
        is_whole = True
    """
    (tmp_path / "imported_under_a_signal.py").write_text(textwrap.dedent(module))
    monkeypatch.syspath_prepend(tmp_path)
    with stop_signals(rank=0), pytest.raises(Interrupted) as ended:  # noqa: PT012 (where it comes is the point)
        imported = importlib.import_module("imported_under_a_signal")
        time.sleep(10)
    assert imported.is_whole
    assert ended.value.code == 75


TWO_RANKS = ["trainer.devices=2", "trainer/strategy=ddp", "trainer.accelerator=cpu", "trainer.max_steps=8"]

NO_LENGTH = [override for override in TINY if not override.startswith("trainer.max_steps")]

LOSS_OF_ONE_RANK = """
    import importlib.util, os, signal
    from dataclasses import dataclass
    from pathlib import Path
    from lightning.pytorch.callbacks import Callback
    from afmoe import register

    @register("callbacks", "rank_one")
    class RankOne(Callback):
        @dataclass(kw_only=True)
        class Config:
            pass

        def __init__(self, config):
            pass

        def on_after_backward(self, trainer, pl_module):
            # gradients are the ranks' sum and stay finite
            if trainer.global_rank == 1 and trainer.global_step == 1:
                pl_module.step_loss = pl_module.step_loss * float("inf")

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_rank == 1 and trainer.global_step == 4 and Path("ring").exists():
                os.kill(os.getpid(), signal.SIGTERM)

    # not by runpy: each rank starts what `sys.argv` says, which has to be this program
    spec = importlib.util.spec_from_file_location("sft", {recipe!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
"""


@pytest.mark.slow
def test_what_one_rank_meets_all_ranks_answer_at_the_same_step(tmp_path: Path) -> None:
    """A loss on rank 1 that is no number skips the step on rank 0 too; a signal to rank 1 ends both."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(LOSS_OF_ONE_RANK.format(recipe=str(RECIPE))))
    option = tmp_path / "conf" / "callbacks" / "rank_one.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("rank_one: {name: rank_one}\n")
    given = [f"hydra.searchpath=[file://{option.parent.parent}]", "callbacks=[load_balance,rank_one]"]

    def start(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(program), *NO_LENGTH, *TWO_RANKS, *given, f"run_name={name}"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    assert start("whole").returncode == 0
    whole = tmp_path / "outputs" / "whole"
    assert metrics(whole)["train/skipped_steps"] == 1

    (tmp_path / "ring").touch()
    stopped = start("a")
    run = tmp_path / "outputs" / "a"
    assert stopped.returncode == 75, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert metrics(run)["status"] == "interrupted"
    newest = newest_checkpoint(run)
    assert newest is not None
    assert checkpoint_step(newest) == 5
    (tmp_path / "ring").unlink()
    assert start("a").returncode == 0
    assert_same_weights(weights(whole), weights(run))
    assert metrics(run)["train/skipped_steps"] == 1
