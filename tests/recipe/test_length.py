"""When a run ends, what it keeps, and that it goes on when a limit is raised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from afmoe.checkpoint.directory import whole_checkpoints
from tests.recipe.conftest import TINY, Result
from tests.recipe.test_runs import assert_same_weights, metrics, weights

Run = Callable[..., Result]

ACCUMULATE = "trainer.accumulate_grad_batches=2"
NO_STEPS = [*TINY, "trainer.max_steps=-1"]


def steps_of(run: Path) -> list[int]:
    return [step for step, _ in whole_checkpoints(run)]


def test_a_run_of_so_many_tokens_is_bitwise_the_run_of_its_steps(sft: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    # an epoch has 2,148 tokens: the end lies in the second one
    assert sft(*NO_STEPS, "run_name=tokens", "trainer.max_tokens=2500").code == 0
    tokens = metrics(outputs / "tokens")
    assert tokens["stopped_by"] == "max_tokens"
    assert tokens["train/tokens"] >= 2500
    steps = int(tokens["train/steps"])
    # the schedule ends with the run as it would by steps
    assert sft(*TINY, "run_name=steps", f"trainer.max_steps={steps}").code == 0
    assert_same_weights(weights(outputs / "tokens"), weights(outputs / "steps"))
    # a step less had not been enough: the records say what each step held
    records = [json.loads(line) for line in (outputs / "tokens" / "steps.jsonl").read_text().splitlines()[1:]]
    tokens_of_steps = [record["tokens"] for record in records]
    assert sum(tokens_of_steps) == tokens["train/tokens"]
    assert sum(tokens_of_steps[:-1]) < 2500

    again = sft(*NO_STEPS, "run_name=tokens", "trainer.max_tokens=2500")
    assert "is finished" in again.out + again.err


@pytest.mark.slow
def test_more_tokens_continue_a_run_whose_steps_have_another_size(sft: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    assert sft(*NO_STEPS, "run_name=tokens", "trainer.max_tokens=2500").code == 0
    otherwise = ["data.batch_size=3", "data.allow_batch_change=true"]
    assert sft(*NO_STEPS, "run_name=tokens", "trainer.max_tokens=2900", *otherwise).code == 0
    more = metrics(outputs / "tokens")
    # at most a step of 3 packs of 64 tokens too many
    assert 2900 <= more["train/tokens"] < 2900 + 192


def test_tokens_and_steps_end_a_run_at_what_comes_first(sft: Run, tmp_path: Path) -> None:
    assert sft(*TINY, "run_name=a", "trainer.max_tokens=100000").code == 0
    assert metrics(tmp_path / "outputs" / "a")["stopped_by"] == "max_steps"
    # no epoch is planned beyond the other limit: 10^12 tokens would be 10^9 epochs
    epochs = ["trainer.max_epochs=1", "scheduler=constant", "data.num_train_rows=16"]
    assert sft(*NO_STEPS, *epochs, "run_name=b", "trainer.max_tokens=1000000000000").code == 0
    assert metrics(tmp_path / "outputs" / "b")["stopped_by"] == "max_epochs"
    refused = sft(*TINY, "trainer.max_tokens=5", "trainer.limit_train_batches=2")
    assert refused.code == 1
    assert "trainer.max_tokens=5 counts the tokens of whole epochs" in refused.err


@pytest.mark.slow
def test_epochs_end_a_run_and_more_of_them_continue_it(sft: Run, tmp_path: Path) -> None:
    short = [*NO_STEPS, "run_name=a", "data.num_train_rows=16", "scheduler=constant"]
    assert sft(*short, "trainer.max_epochs=1").code == 0
    first = metrics(tmp_path / "outputs" / "a")
    assert first["stopped_by"] == "max_epochs"
    again = sft(*short, "trainer.max_epochs=1")
    assert "is finished" in again.out + again.err
    assert sft(*short, "trainer.max_epochs=2").code == 0
    second = metrics(tmp_path / "outputs" / "a")
    assert second["train/tokens"] == 2 * first["train/tokens"]


@pytest.mark.slow
def test_time_ends_a_run_between_steps_with_a_checkpoint_and_more_time_continues_it(
    sft: Run, tmp_path: Path
) -> None:
    timed = [
        *NO_STEPS,
        "run_name=a",
        "scheduler=constant",
        "trainer.accumulate_grad_batches=2",
        "checkpoint.every_n_steps=1000",
        "trainer.log_every_n_steps=10",
    ]
    run = tmp_path / "outputs" / "a"
    assert sft(*timed, "trainer.max_time=00:00:00:01").code == 0
    first = metrics(run)
    assert (first["status"], first["stopped_by"]) == ("finished", "max_time")
    assert steps_of(run) == [first["train/steps"]]
    again = sft(*timed, "trainer.max_time=00:00:00:01")
    assert "is finished" in again.out + again.err
    result = sft(*timed, "trainer.max_time=00:00:00:02")
    assert f"from step {first['train/steps']}" in result.out + result.err
    assert metrics(run)["train/steps"] > first["train/steps"]


def test_early_stopping_ends_a_run_with_a_checkpoint_and_more_patience_continues_it(
    sft: Run, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    stopping = [
        *TINY,
        "callbacks=[load_balance,early_stopping]",
        "callbacks.early_stopping.min_delta=100",
        "trainer.max_steps=40",
        "scheduler=constant",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=4",
        "checkpoint.every_n_steps=100",
    ]
    # the first validation, at step 0, is the best
    assert sft(*stopping, "run_name=a", "callbacks.early_stopping.patience=2").code == 0
    first = metrics(outputs / "a")
    assert (first["status"], first["stopped_by"]) == ("finished", "early_stopping")
    assert steps_of(outputs / "a") == [first["train/steps"]] == [4]
    again = sft(*stopping, "run_name=a", "callbacks.early_stopping.patience=2")
    assert "is finished" in again.out + again.err
    # what it has seen is in the checkpoint: a validation more, not three
    assert sft(*stopping, "run_name=a", "callbacks.early_stopping.patience=3").code == 0
    assert metrics(outputs / "a")["train/steps"] == 6
    assert sft(*stopping, "run_name=whole", "callbacks.early_stopping.patience=3").code == 0
    assert_same_weights(weights(outputs / "whole"), weights(outputs / "a"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["callbacks=[early_stopping]", "callbacks.early_stopping.monitor=val/los"], "val/loss"),
        (["callbacks=[early_stopping]", "trainer.limit_val_batches=0"], "no row is held out"),
        (["callbacks=[early_stopping]", "callbacks.early_stopping.mode=least"], "min, max"),
        (["callbacks=[early_stopping]", "callbacks.early_stopping.min_delta=nan"], "a finite number from 0"),
        # found at the start, not at the first validation after it
        (["checkpoint.best_metric=val/los", "trainer.val_check_interval=100"], "val/token_accuracy"),
        (["checkpoint.best_metric=val/loss", "data.num_validation_rows=0"], "no row is held out"),
        (["checkpoint.best_metric=val/loss", "checkpoint.every_n_steps=0"], "writes none"),
        (
            ["checkpoint.best_metric=val/loss", "trainer.val_check_interval=3", ACCUMULATE],
            "multiple of trainer.accumulate_grad_batches=2",
        ),
        (["checkpoint.best_mode=least"], "min, max"),
        (
            ["trainer.check_val_every_n_epoch=1", "trainer.val_check_interval=100"],
            "trainer.val_check_interval=100 counts within an epoch",
        ),
        (["faults.max_skipped_steps=0"], "at least 1"),
        (["trainer.max_tokens=0"], "at least 1"),
        (["trainer.max_time=00:00:00:00"], "must be longer than 00:00:00:00"),
        (["trainer.max_steps=-1"], "scheduler=wsd needs the length of the run"),
        (["trainer.max_steps=-1", "trainer.max_time=00:01:00:00"], "needs the length of the run"),
        (["trainer.max_steps=-1", "trainer.max_epochs=-1"], "needs the length of the run"),
        (["trainer.limit_train_batches=0.0001"], "limit_train_batches=0.0001 is less than one of the"),
        (["trainer.limit_val_batches=0.0001"], "limit_val_batches=0.0001 is less than one of the"),
        (["optim.freeze=['*']"], "every one is frozen"),
        (["attention=flex"], "attention=flex cannot train on a CPU"),
    ],
)
def test_what_cannot_work_is_one_line_in_a_dry_run_too(sft: Run, overrides: list[str], message: str) -> None:
    for more in ([], ["dry_run=true"]):
        refused = sft(*TINY, "trainer.val_check_interval=2", *overrides, *more)
        assert refused.code == 1
        assert message in refused.err.splitlines()[-1]


def test_a_run_without_end_is_for_a_schedule_without_end(sft: Run) -> None:
    said = sft(*NO_STEPS, "scheduler=constant", "dry_run=true").out
    assert "no limit; a step is" in said
    assert "100 tokens; a step is" in sft(*NO_STEPS, "trainer.max_tokens=100", "dry_run=true").out


def test_no_steps_are_a_validation_without_an_export_and_more_of_them_start_the_run(
    sft: Run, tmp_path: Path
) -> None:
    run = tmp_path / "outputs" / "a"
    none = sft(*TINY, "run_name=a", "trainer.max_steps=0")
    assert none.code == 0, none.err
    assert "no step was trained, so nothing is exported" in none.out + none.err
    values = metrics(run)
    assert (values["status"], values["train/steps"], values["train/loss"]) == ("finished", 0, None)
    # of random weights: log 267
    assert values["val/loss"] == pytest.approx(5.6, abs=0.1)
    assert not (run / "export").exists()
    again = sft(*TINY, "run_name=a", "trainer.max_steps=0")
    assert "is finished at step 0" in again.out + again.err
    assert sft(*TINY, "run_name=a", "trainer.max_steps=1").code == 0
    assert metrics(run)["train/steps"] == 1
    assert (run / "export").exists()


def test_a_dry_run_counts_what_all_processes_do(sft: Run) -> None:
    two = ["trainer.devices=2", "trainer/strategy=ddp", "trainer.accelerator=cpu"]
    said = " ".join(sft(*TINY, *two, "dry_run=true").out.split())
    assert "2 processes" in said
    assert "a step is 4 packs of all 2 processes of up to 64 tokens" in said
    # as one process with the same packs in a step
    whole = " ".join(sft(*TINY, "data.batch_size=4", "dry_run=true").out.split())
    labels = re.compile(r"([\d,]+) labels in the optimizer step")
    assert labels.findall(said) == labels.findall(whole)


def test_the_validation_of_the_last_weights_counts_for_the_best_checkpoint(sft: Run, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "a"
    best = [*TINY, "run_name=a", "scheduler=constant", "checkpoint.best_metric=val/loss"]
    # the only other one is before the first step, and the loss falls
    assert sft(*best).code == 0
    assert (run / "checkpoints" / "best").read_text() == "step-000004\n"
    last = metrics(run)["val/loss"]
    # what was the best is known where the run goes on
    assert sft(*best, "trainer.max_steps=6", "checkpoint.every_n_steps=5").code == 0
    state = torch.load(run / "checkpoints" / "step-000005" / "training_state.pt", weights_only=True)
    assert state["callbacks"]["SaveCheckpoints"]["best_value"] == last


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_continues_like_any_other(sft: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    validated = [*TINY, "trainer.max_steps=9", "scheduler=constant", "trainer.val_check_interval=2"]
    # the loss falls, so that the largest is the first
    worst = [*validated, "checkpoint.best_metric=val/loss", "checkpoint.best_mode=max"]
    assert sft(*worst, "run_name=a", "checkpoint.every_n_steps=3", "checkpoint.keep_last=1").code == 0
    assert (outputs / "a" / "checkpoints" / "best").read_text() == "step-000002\n"
    assert steps_of(outputs / "a") == [2, 9]
    # it was written after the validation of its step
    assert sft(*worst, "run_name=b", "resume=outputs/a/checkpoints/step-000002").code == 0
    assert_same_weights(weights(outputs / "a"), weights(outputs / "b"))
    for name in ("train/loss", "val/loss", "train/tokens"):
        assert metrics(outputs / "a")[name] == metrics(outputs / "b")[name]
    logs = [EventAccumulator(str(outputs / run / "tensorboard")).Reload() for run in "ab"]
    whole, branch = ([event.step for event in log.Scalars("val/loss")] for log in logs)
    # Lightning counts the steps before a validation in training from 0; the last one comes after training
    assert whole == [0, 1, 3, 5, 7, 9]
    assert branch == [3, 5, 7, 9]

    best = [*validated, "checkpoint.best_metric=val/loss", "checkpoint.keep_last=1"]
    assert sft(*best, "run_name=c", "checkpoint.every_n_steps=9").code == 0
    assert (outputs / "c" / "checkpoints" / "best").read_text() == "step-000009\n"
    assert steps_of(outputs / "c") == [9]


def test_a_run_continues_from_the_end_of_an_epoch_at_which_a_validation_was_due(
    sft: Run, tmp_path: Path
) -> None:
    # an epoch is 10 batches
    options = [*TINY, "scheduler=constant", "trainer.max_steps=13", "trainer.val_check_interval=5"]
    options += ["data.batch_size=4", "checkpoint.every_n_steps=5", "checkpoint.keep_last=3"]
    assert sft(*options, "run_name=a").code == 0
    assert sft(*options, "run_name=b", "resume=outputs/a/checkpoints/step-000010").code == 0
    assert (
        metrics(tmp_path / "outputs" / "b")["train/tokens"]
        == metrics(tmp_path / "outputs" / "a")["train/tokens"]
    )
    assert_same_weights(weights(tmp_path / "outputs" / "a"), weights(tmp_path / "outputs" / "b"))


def test_a_moved_run_folder_continues_bitwise(sft: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    constant = [*TINY, "scheduler=constant"]
    assert sft(*constant, "run_name=whole", "trainer.max_steps=8").code == 0
    assert sft(*constant, "run_name=a").code == 0
    elsewhere = tmp_path / "elsewhere" / "moved"
    elsewhere.parent.mkdir()
    (outputs / "a").rename(elsewhere)
    result = sft(*constant, f"hydra.run.dir={elsewhere}", "trainer.max_steps=8")
    assert result.code == 0, result.err
    assert "from step 4" in result.out + result.err
    assert_same_weights(weights(outputs / "whole"), weights(elsewhere))
    for name in ("train/loss", "train/tokens", "val/loss"):
        assert metrics(outputs / "whole")[name] == metrics(elsewhere)[name]
    assert not (outputs / "a").exists()
    # and under another name, without telling where it was
    elsewhere.rename(outputs / "renamed")
    assert sft(*constant, "run_name=renamed", "trainer.max_steps=10").code == 0
    assert metrics(outputs / "renamed")["train/steps"] == 10


def test_a_debug_run_leaves_the_ordinary_run_alone(sft: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    assert sft(*TINY, "run_name=a").code == 0
    before = {path: path.stat().st_mtime_ns for path in (outputs / "a").rglob("*")}
    tiny = [one for one in TINY if not one.startswith(("trainer.max_steps", "checkpoint", "trainer.val"))]
    for _ in range(2):
        # not finished the second time: it starts anew
        result = sft(*tiny, "run_name=a", "debug=fast_dev_run")
        assert result.code == 0, result.err
        assert "finished at step 2" in result.out
    assert {path: path.stat().st_mtime_ns for path in (outputs / "a").rglob("*")} == before
    names = {"a", "a-debug_fast_dev_run", "a-debug_fast_dev_run.1"}
    assert {path.name for path in outputs.iterdir()} == names
    left = {path.name for path in (outputs / "a-debug_fast_dev_run").iterdir()}
    assert not left & {"checkpoints", "export", "tensorboard"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Anomaly Detection has been enabled.*:UserWarning")
@pytest.mark.parametrize("preset", ["overfit", "profiler", "anomaly"])
def test_every_debug_preset_runs(sft: Run, tmp_path: Path, preset: str) -> None:
    tiny = [one for one in TINY if not one.startswith(("checkpoint", "trainer.max_steps"))]
    length = ["trainer.max_steps=4"] if preset == "anomaly" else []
    result = sft(*tiny, "run_name=a", f"debug={preset}", *length)
    assert result.code == 0, result.err
    values = metrics(tmp_path / "outputs" / f"a-debug_{preset}")
    if preset == "overfit":
        # from 5.6; measured 0.002
        assert values["train/loss"] < 0.1
    if preset == "profiler":
        assert "run_training_batch" in result.out + result.err
