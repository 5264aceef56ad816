"""The section `memory` in whole runs: what changes no number, what changes rounding, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afmoe.hardware import has_cxx_compiler
from tests.recipe.conftest import TINY, Result

Run = Callable[..., Result]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-000004" / "model.safetensors")


def test_checkpointing_may_change_in_the_middle_of_a_run_and_changes_no_bit(sft: Run, tmp_path: Path) -> None:
    options = (*TINY, "scheduler=constant", "model.attention_dropout=0.2", "export.enabled=false")
    assert sft(*options, "run_name=without").code == 0
    for steps, mode in ((2, "full"), (4, "selective")):
        memory = f"memory.activation_checkpointing={mode}"
        result = sft(*options, "run_name=changed", f"trainer.max_steps={steps}", memory)
        assert result.code == 0, result.err
    without, changed = (weights(tmp_path / "outputs" / name) for name in ("without", "changed"))
    assert without.keys() == changed.keys()
    assert [name for name in without if not torch.equal(without[name], changed[name])] == []


def test_a_chunk_of_a_few_tokens_trains_to_the_same_loss(sft: Run, tmp_path: Path) -> None:
    losses = {}
    for name, chunk in (("whole", "null"), ("chunks", "5")):
        result = sft(*TINY, f"run_name={name}", f"memory.loss_chunk_tokens={chunk}")
        assert result.code == 0, result.err
        metrics = json.loads((tmp_path / "outputs" / name / "metrics.json").read_text())
        losses[name] = metrics["val/loss"], metrics["train/loss"]
    # measured 0 and 8e-8
    assert losses["chunks"] == pytest.approx(losses["whole"], rel=1e-6)


def test_what_this_machine_cannot_compile_is_refused_at_once(
    sft: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = sft(*TINY, "memory.compile_layers=true", "run_name=refused")
    assert result.code == 1
    assert "memory.compile_layers=true needs a C++ compiler" in result.err
    assert not (tmp_path / "outputs" / "refused" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory.activation_checkpointing=layers", "must be one of none, full, selective, got layers"),
        ("memory.loss_chunk_tokens=0", "memory.loss_chunk_tokens must be at least 1, got 0"),
        ("memory.compile_layer=true", "there is no `compile_layer` in memory"),
    ],
)
def test_a_mistake_is_one_line(sft: Run, override: str, message: str) -> None:
    result = sft(*TINY, override)
    assert result.code == 1
    assert message in result.err


@pytest.mark.slow
@pytest.mark.skipif(not has_cxx_compiler(), reason="needs a C++ compiler")
# measured 2e-7, and 1.8e-5 in fp8, where a value that is rounded otherwise may cross the border of two codes
@pytest.mark.parametrize(("compute", "tolerance"), [("native", 1e-5), ("fp8", 6e-5)])
def test_compiled_layers_train_validate_and_export_as_others_do(
    sft: Run, tmp_path: Path, compute: str, tolerance: float
) -> None:
    losses, names = {}, {}
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        choices = (f"moe/compute={compute}", f"memory.compile_layers={compiled}")
        result = sft(*TINY, f"run_name={name}", *choices, "trainer.val_check_interval=2")
        assert result.code == 0, result.err
        run = tmp_path / "outputs" / name
        metrics = json.loads((run / "metrics.json").read_text())
        losses[name] = metrics["val/loss"], metrics["train/loss"]
        names[name] = weights(run).keys()
        assert (run / "export" / "model.safetensors").is_file()
    assert names["compiled"] == names["eager"]
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=tolerance)
