"""Steps with a NaN or an infinity: skipped and counted, and after some in a row the run stops and can be
replayed.

The fault comes from a callback as a person could write one, in place of a bad batch or an overflow.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from afmoe import register
from afmoe.faults import LaggedFlag, non_finite
from afmoe.replay import FirstNonFinite
from tests.recipe.conftest import TINY, Result
from tests.recipe.test_runs import assert_same_weights, metrics, weights

Run = Callable[..., Result]
ROOT = Path(__file__).parents[2]


@register("callbacks", "poison")
class Poison(Callback):
    """Puts a value into the final norm (`loss`: a NaN into the loss alone) for the steps from `first` to
    `last`; notes what each step changed.
    """

    @dataclass(kw_only=True)
    class Config:
        first: int = 0
        last: int = -1
        value: str = "nan"
        stays: bool = False

    changed: dict[int, bool]

    def __init__(self, config: Config) -> None:
        self.config = config
        Poison.changed = self.changed = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.before = state_of(trainer, pl_module)
            self.is_bad = self.config.first <= trainer.global_step <= self.config.last
        if self.is_bad and self.config.value != "loss":
            self.weight = pl_module.model.model.norm.weight.data
            self.kept = self.weight[0].clone()
            self.weight[0] = float(self.config.value)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.is_bad and self.config.value == "loss":
            pl_module.step_loss = pl_module.step_loss * math.nan

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_bad and self.config.value != "loss" and not self.config.stays:
            self.weight[0] = self.kept
        if pl_module.is_step_end(batch_idx):
            after = state_of(trainer, pl_module)
            self.changed[trainer.global_step] = any(
                not torch.equal(after[name], tensor) for name, tensor in self.before.items()
            )


def state_of(trainer: Any, pl_module: Any) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in pl_module.model.state_dict().items()}
    for index, values in trainer.optimizers[0].state_dict()["state"].items():
        tensors = {name: value for name, value in values.items() if torch.is_tensor(value)}
        state |= {f"{index}.{name}": value.clone() for name, value in tensors.items()}
    return state


@pytest.fixture
def poisoned(sft: Run, tmp_path: Path) -> Run:
    """The recipe with the callback above, which an outside package would bring like this."""
    option = tmp_path / "conf" / "callbacks" / "poison.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("poison: {name: poison, first: 0, last: -1, value: nan, stays: false}\n")
    given = [f"hydra.searchpath=[file://{option.parent.parent}]", "callbacks=[load_balance,poison]"]
    return lambda *overrides: sft(*TINY, *given, *overrides)


@pytest.mark.parametrize("optim", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_step_with_a_nan_is_skipped_counted_and_changes_nothing(
    poisoned: Run, tmp_path: Path, optim: str
) -> None:
    result = poisoned(
        f"optim={optim}",
        "run_name=a",
        "callbacks.poison.first=1",
        "callbacks.poison.last=1",
        "trainer.accumulate_grad_batches=2",
        "data.batch_size=1",
    )
    assert result.code == 0, result.err
    assert Poison.changed == {1: True, 2: False, 3: True, 4: True}
    values = metrics(tmp_path / "outputs" / "a")
    assert values["status"] == "finished"
    assert values["train/skipped_steps"] == 1
    assert values["train/steps"] == 4
    # the mean of the steps that count
    assert 4 < values["train/loss"] < 6
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "outputs" / "a").values())
    assert "1 steps with a NaN or an infinity" in result.out
    events = EventAccumulator(str(tmp_path / "outputs" / "a" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("train/skipped_steps")] == [0, 1, 1, 1]


@pytest.mark.slow
def test_the_count_goes_on_in_a_resumed_run_which_is_bitwise_the_undisturbed_one(
    poisoned: Run, tmp_path: Path
) -> None:
    bad = ["callbacks.poison.first=1", "callbacks.poison.last=2", "scheduler.decay_fraction=0.0"]
    assert poisoned(*bad, "run_name=whole", "trainer.max_steps=6").code == 0
    # the checkpoint of step 2 lies between the two bad steps
    assert poisoned(*bad, "run_name=parts", "trainer.max_steps=2").code == 0
    assert poisoned(*bad, "run_name=parts", "trainer.max_steps=6").code == 0
    assert_same_weights(weights(tmp_path / "outputs" / "whole"), weights(tmp_path / "outputs" / "parts"))
    for name in ("whole", "parts"):
        assert metrics(tmp_path / "outputs" / name)["train/skipped_steps"] == 2


def test_ten_bad_steps_in_a_row_stop_the_run_and_are_replayed(
    poisoned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # an overflow: the weight is finite, what is made of it is not
    result = poisoned(
        "run_name=a",
        "trainer.max_steps=40",
        "trainer.accumulate_grad_batches=2",
        "data.batch_size=1",
        "callbacks.poison.first=3",
        "callbacks.poison.last=99",
        "callbacks.poison.value=3e38",
        "callbacks.poison.stays=true",
    )
    assert result.code == 1
    fault = tmp_path / "outputs" / "a" / "faults" / "step-000013"
    assert f"python scripts/replay_batch.py {fault}" in result.err
    assert "10 optimizer steps in a row, up to 13" in result.err
    assert len(result.err.strip().splitlines()[-1]) < 700
    values = metrics(tmp_path / "outputs" / "a")
    assert (values["status"], values["train/skipped_steps"]) == ("failed", 10)
    assert {path.name for path in fault.iterdir()} == {
        "fault.json",
        "micro-batches-00000.safetensors",
        "model.safetensors",
    }

    monkeypatch.setattr(sys, "argv", ["replay_batch.py", str(fault)])
    code = runpy.run_path(str(ROOT / "scripts" / "replay_batch.py"))["main"]()
    said = capfd.readouterr().out
    assert code == 0, said
    assert "1 ranks x 2 micro-batches" in said
    assert "micro-batch 0 of rank 0: forward, the output of model.norm" in said
    for figure in ("loss", "gradient norm"):
        assert re.search(rf"^{figure}: (\S+) in the run, \1 now: reproduced$", said, re.MULTILINE), said


def test_a_finite_loss_is_replayed_to_the_digit(poisoned: Run, tmp_path: Path) -> None:
    """The loss stays finite and only the norm of the gradients overflows."""
    result = poisoned(
        "run_name=a",
        "faults.max_skipped_steps=1",
        "trainer.accumulate_grad_batches=2",
        "data.batch_size=1",
        "callbacks.poison.first=2",
        "callbacks.poison.last=9",
        "callbacks.poison.value=1e22",
        "callbacks.poison.stays=true",
    )
    assert result.code == 1
    fault = tmp_path / "outputs" / "a" / "faults" / "step-000003"
    record = json.loads((fault / "fault.json").read_text())
    assert record["loss"] not in ("nan", "inf")
    assert record["gradient_norm"] == "inf"

    from afmoe.fault_record import read_fault
    from afmoe.replay import is_reproduced, replay

    again = replay(read_fault(fault), "cpu")
    # measured 0: the same sums in the same order
    assert again.loss == float(record["loss"])
    assert is_reproduced(float("inf"), again.gradient_norm)
    assert again.first is not None
    assert not is_reproduced(float(record["loss"]) * 1.01, again.loss)
    assert not is_reproduced(float("nan"), again.gradient_norm)


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_finite_gradients_are_replayed_in_the_precision_of_the_run(
    poisoned: Run, tmp_path: Path, precision: str
) -> None:
    """Only the loss is no number, so the norm of the gradients has digits to compare."""
    bad = ["callbacks.poison.first=1", "callbacks.poison.last=9", "callbacks.poison.value=loss"]
    result = poisoned("run_name=a", "faults.max_skipped_steps=1", f"trainer.precision={precision}", *bad)
    assert result.code == 1
    from afmoe.fault_record import read_fault
    from afmoe.replay import is_reproduced, replay

    fault = read_fault(tmp_path / "outputs" / "a" / "faults" / "step-000002")
    # halved after the step
    assert fault.loss_scale == (32768.0 if precision == "16-mixed" else 1.0)
    assert is_reproduced(fault.gradient_norm, replay(fault, "cpu").gradient_norm)


def test_the_first_value_that_is_not_finite_is_named() -> None:
    class Root(nn.Module):
        def forward(self, numbers: Tensor) -> Tensor:
            return numbers.sqrt()

    def first_of(scale: float, numbers: list[float]) -> str | None:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), Root())
        model[0].weight.data.fill_(scale)
        watch = FirstNonFinite(model)
        watch.place = "here"
        model(torch.tensor(numbers)[:, None]).sum().backward()
        return watch.first

    assert first_of(1.0, [1.0, 4.0]) is None
    forward = first_of(1.0, [1.0, -4.0])
    assert forward == "here: forward, the output of 1 (Root), in 1 of 2 values"
    # the root's slope at 0
    backward = first_of(1.0, [1.0, 0.0])
    assert backward == "here: backward, the gradient of the output of 0 (Linear), in 1 of 2 values"
    weight = first_of(float("inf"), [1.0, 4.0])
    assert weight == "before the first batch: the weight 0.weight, in 1 of 1 values"


def test_a_flag_is_one_for_nan_and_infinity_only() -> None:
    number, huge = torch.tensor(2.0), torch.tensor(3e38)
    assert non_finite(number, huge) == 0
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert non_finite(number, torch.tensor(bad)) == 1
        assert non_finite(torch.tensor(bad), None) == 1


def test_flags_of_a_cpu_are_read_at_once_and_once() -> None:
    flags = LaggedFlag()
    flags.push(torch.tensor(0.0))
    flags.push(torch.tensor(1.0))
    assert flags.read() == [0.0, 1.0]
    assert flags.read(wait=True) == []
