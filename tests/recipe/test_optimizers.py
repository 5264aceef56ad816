"""Optimizers, schedules and precisions in whole runs: what is said, logged, kept and continued."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.recipe.conftest import TINY, Result
from tests.recipe.test_runs import assert_same_weights, metrics, weights

Run = Callable[..., Result]
_SMEBU = "callbacks.selection_bias.rule=smebu"
QUIET = ["logger.enabled=false", "export.enabled=false"]


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def states(run: Path) -> dict[str, Any]:
    name = (run / "checkpoints" / "last").read_text().strip()
    return torch.load(run / "checkpoints" / name / "training_state.pt", weights_only=True)


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    else:
        assert one == other, path


@pytest.mark.parametrize(
    "choices",
    [
        ["optim=muon", "optim.rates={*.router.*:0.1}", "optim.freeze=['*.self_attn.*']", "scheduler=cosine"],
        ["trainer.precision=bf16-true", "callbacks=[fp32_router]"],
        ["trainer.precision=bf16-true", "optim=muon", "callbacks=[selection_bias]", _SMEBU],
        ["trainer.precision=16-mixed"],
    ],
    ids=" ".join,
)
def test_a_run_in_two_parts_is_bitwise_the_run_in_one(choices: list[str], sft: Run, tmp_path: Path) -> None:
    common = [*TINY, *QUIET, *choices]
    if not any(choice.startswith("callbacks") for choice in choices):
        common.append("callbacks=[]")
    # the length decides the schedule, so the first part is a run that is continued from half-way
    assert sft(*common, "run_name=whole").code == 0
    resumed = sft(*common, "run_name=parts", "resume=outputs/whole/checkpoints/step-000002")
    assert resumed.code == 0, resumed.err
    whole, parts = (tmp_path / "outputs" / name for name in ("whole", "parts"))
    assert_same_weights(weights(whole), weights(parts))
    for key in ("optimizer_states", "lr_schedulers"):
        assert_same(states(whole)[key], states(parts)[key])
    assert states(whole).get("LossScaling") == states(parts).get("LossScaling")
    assert ("LossScaling" in states(whole)) == ("trainer.precision=16-mixed" in choices)


def test_groups_and_frozen_parameters_are_told_at_the_start(sft: Run) -> None:
    result = sft(
        *TINY,
        *QUIET,
        "optim=muon",
        "optim.lr=0.02",
        "optim.adamw_lr=0.004",
        "optim.freeze=[model.layers.0.*]",
        "optim.rates={*.router.*:0.5}",
        "callbacks=[]",
        "trainer.max_steps=1",
    )
    assert result.code == 0, result.err
    said = result.out + result.err
    for line in (
        r"dense_decay: 16 tensors, [\d,]+ values, muon, learning rate 0.02, weight decay 0.01",
        r"dense_no_decay: 15 tensors, [\d,]+ values, adamw, learning rate 0.004, weight decay 0",
        r"dense_no_decay_x0.5: 2 tensors, 256 values, adamw, learning rate 0.002, weight decay 0",
        r"experts_decay: 6 tensors, 24,576 values, muon, learning rate 0.02, weight decay 0.01",
        r"frozen: 14 tensors, [\d,]+ values: model.layers.\*.self_attn.q_proj.weight, .*, and 10 more kinds",
    ):
        assert re.search(line, said), line


def test_freeze_router_shows_among_the_frozen(sft: Run) -> None:
    result = sft(*TINY, *QUIET, "callbacks=[freeze_router]", "trainer.max_steps=1")
    assert result.code == 0, result.err
    assert "frozen: 2 tensors, 256 values: model.layers.*.mlp.router.gate.weight" in result.out + result.err


@pytest.mark.parametrize("more", [[], ["dry_run=true"]], ids=["run", "dry_run"])
def test_pattern_of_no_parameter_ends_in_one_line(more: list[str], sft: Run, tmp_path: Path) -> None:
    result = sft(*TINY, "optim.freeze=['*.routr.*']", *more)
    assert result.code == 1
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "optim.freeze: no parameter is called *.routr.*; the closest: " in line
    assert "model.layers.*.mlp.router.gate.weight" in line
    assert not list((tmp_path / "outputs").glob("*/checkpoints"))


def test_contradicting_callbacks_end_in_one_line(sft: Run) -> None:
    result = sft(*TINY, "callbacks=[freeze_router,selection_bias]")
    assert result.code == 1
    assert "error: callbacks=selection_bias does not go with freeze_router: " in result.err


def test_planned_rate_is_in_tensorboard_once_and_is_the_rate_that_is_used(sft: Run, tmp_path: Path) -> None:
    common = [*TINY, "scheduler.warmup_steps=2", "scheduler.decay_fraction=0.5", "export.enabled=false"]
    run = tmp_path / "outputs" / "a"
    assert sft(*common, "run_name=a").code == 0
    plan = scalars(run, "plan/lr")
    # the warm-up of a run of 4 steps is cut to one
    assert plan == [
        (0, pytest.approx(4e-3)),
        *[(s, pytest.approx(4e-3)) for s in (1, 2)],
        (3, pytest.approx(2e-3)),
    ]
    used = scalars(run, "train/lr/dense_decay")
    assert used == [(step, pytest.approx(rate)) for step, rate in plan]
    # longer: the part that is still to come is planned anew, the past stays
    assert sft(*common, "run_name=a", "trainer.max_steps=6").code == 0
    plan = scalars(run, "plan/lr")
    assert [step for step, _ in plan] == [0, 1, 2, 3, 4, 5]
    assert [rate for _, rate in plan[4:]] == [pytest.approx(4e-3 * left / 3) for left in (2, 1)]
    assert len(list((run / "tensorboard").iterdir())) >= 2


def test_loss_scale_is_logged_under_fp16(sft: Run, tmp_path: Path) -> None:
    result = sft(*TINY, "trainer.precision=16-mixed", "run_name=a", "export.enabled=false")
    assert result.code == 0, result.err
    logged = scalars(tmp_path / "outputs" / "a", "train/loss_scale")
    assert logged
    assert all(scale in (2.0**exponent for exponent in range(17)) for _, scale in logged)
    assert metrics(tmp_path / "outputs" / "a")["status"] == "finished"


def test_run_without_a_length_needs_the_constant_schedule(sft: Run) -> None:
    endless = [*TINY, *QUIET, "trainer.max_steps=-1", "trainer.max_time=00:00:00:01"]
    refused = sft(*endless, "run_name=refused")
    assert refused.code == 1
    assert "scheduler=wsd needs the length of the run" in refused.err
    assert sft(*endless, "scheduler=constant", "run_name=endless").code == 0
