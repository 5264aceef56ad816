"""`scripts/compare_runs.py` on runs of the recipe: the same twice, two seeds, killed and resumed, moved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from afmoe.step_records import FILE, append, keep_until, read_records
from callbacks.record_steps import checksums, shortest
from tests.recipe.conftest import TINY

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_runs.py"


def compare(*arguments: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_same_run_twice_is_bitwise_equal_and_another_seed_differs_at_the_first_step(
    sft: Callable[..., Any], tmp_path: Path
):
    for name, extra in (("a", ()), ("b", ()), ("other", ("seed=4294967295",))):
        assert sft(*TINY, f"run_name={name}", *extra).code == 0
    code, text = compare("outputs/a", "outputs/b", cwd=tmp_path)
    assert (code, text.splitlines()[-1]) == (0, "bitwise equal until step 4 (all 4 steps that both have)")

    code, text = compare("outputs/a", "outputs/other", cwd=tmp_path)
    assert code == 1
    assert "settings that differ: seed: 1234 -> 4294967295" in text
    assert "first difference: step 1: " in text

    code, text = compare("outputs/a", "outputs/other", "--tolerance", "0.9", "--json", cwd=tmp_path)
    found = json.loads(text)
    assert (code, found["agrees"], found["steps"]) == (0, True, 4)
    assert 1e-4 < found["largest"]["loss"]["relative"] < 0.9
    assert compare("outputs/a", "outputs/other", "--tolerance", "1e-6", cwd=tmp_path)[0] == 1

    code, text = compare("outputs/a", "outputs/other", "--until", "2", "--json", cwd=tmp_path)
    assert (code, json.loads(text)["last_step"]) == (1, 2)
    assert compare("outputs/a", "outputs/other", "--until", "0", cwd=tmp_path)[0] == 2


def test_a_resumed_run_equals_the_uninterrupted_one(sft: Callable[..., Any], tmp_path: Path):
    # logs that fall on no checkpoint: the records up to it are written with it
    options = [*TINY, "trainer.log_every_n_steps=3", "trainer.accumulate_grad_batches=2"]
    assert sft(*options, "run_name=whole").code == 0
    assert sft(*options, "run_name=parts").code == 0
    folder = tmp_path / "outputs" / "parts"
    # as a kill after step 3 leaves it: no last checkpoint, records beyond the one before, a torn line
    (folder / "metrics.json").unlink()
    (folder / "checkpoints" / "step-000004" / "complete").unlink()
    keep_until(folder / FILE, 3)
    with (folder / FILE).open("a") as file:
        file.write('{"step":4,"loss":')
    resumed = sft(*options, "run_name=parts")
    assert "from step 2" in resumed.out
    code, text = compare("outputs/whole", "outputs/parts", cwd=tmp_path)
    assert (code, text.splitlines()[-1]) == (0, "bitwise equal until step 4 (all 4 steps that both have)")
    steps = [json.loads(line)["step"] for line in (folder / FILE).read_text().splitlines()[1:]]
    assert steps == [1, 2, 3, 4]


def test_records_hold_what_was_logged_and_one_figure_a_layer(sft: Callable[..., Any], tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert sft(*TINY, "run_name=a").code == 0
    records = read_records(tmp_path / "outputs" / "a" / FILE)
    events = EventAccumulator(str(tmp_path / "outputs" / "a" / "tensorboard")).Reload()
    assert records.layers == [1, 2]
    for tag, name in (
        ("train/loss", "loss"),
        ("train/gradient_norm", "gradient_norm"),
        ("moe/max_violation/layer_02", "max_violation"),
        ("moe/router_confidence/layer_02", "router_confidence"),
    ):
        logged = [event.value for event in events.Scalars(tag)]
        recorded = [step[name][1] if "/layer" in tag else step[name] for step in records.steps.values()]
        assert torch.tensor(recorded).equal(torch.tensor(logged)), tag
    metrics = json.loads((tmp_path / "outputs" / "a" / "metrics.json").read_text())
    assert sum(step["tokens"] for step in records.steps.values()) == metrics["train/tokens"]


def test_it_starts_without_torch(tmp_path: Path):
    # 0.1 s of processor time, measured; torch alone would take seconds
    append(tmp_path / FILE, [1], [{"step": 1, "loss": 1.0}])
    code = f"""
import runpy, sys
sys.argv = ["compare_runs.py", ".", "."]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit as stop:
    assert stop.code == 0
assert "torch" not in sys.modules and "hydra" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "missing"), "missing does not exist"),
        (("a",), "required: B"),
        (("a", "a", "--tolerance", "2"), "[0, 1)"),
        (("a", "late"), "no step in common"),
        (("a", "torn"), "is no line of step records"),
    ],
)
def test_nothing_to_compare_is_one_line_and_code_2(tmp_path: Path, arguments: tuple[str, ...], said: str):
    for name, step in (("a", 1), ("late", 9)):
        (tmp_path / name).mkdir()
        append(tmp_path / name / FILE, [1], [{"step": step, "loss": 1.0}])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / FILE).write_text("{\n")
    code, text = compare(*arguments, cwd=tmp_path)
    assert (code, text.count("\n")) == (2, 1)
    assert said in text


def test_what_differs_is_named_by_step_figure_and_layer(tmp_path: Path):
    step = {"loss": 2.0, "lr": [0.1, 0.2], "router_confidence": [0.25, 0.5], "counts": ["0a", "0b"]}
    changed = {
        "equal": {},
        "count": {"counts": ["0a", "0c"]},
        "confidence": {"router_confidence": [0.25, 0.4]},
        "nan": {"loss": float("nan")},
        "less": {"loss": None},
    }
    for name, change in changed.items():
        (tmp_path / name).mkdir()
        last = {key: value for key, value in ({"step": 3} | step | change).items() if value is not None}
        append(tmp_path / name / FILE, [4, 7], [{"step": 2} | step, last])

    def first(name: str) -> tuple[int, str]:
        code, text = compare("equal", name, cwd=tmp_path)
        return code, next(line for line in text.splitlines() if line.startswith("first difference"))

    assert first("count") == (1, "first difference: step 3: counts of layer 7: 0b in A, 0c in B")
    said = (
        "first difference: step 3: router_confidence of layer 7: 0.5 in A, 0.4 in B, relative difference 0.2"
    )
    assert first("confidence") == (1, said)
    assert first("nan") == (1, "first difference: step 3: loss: 2.0 in A, nan in B")
    assert first("less") == (1, "first difference: step 3: loss: 2.0 in A, absent in B")
    # checksums have no size; a figure that is absent or no number is beyond every tolerance
    codes = {name: compare("equal", name, "--tolerance", "0.3", cwd=tmp_path)[0] for name in changed}
    assert codes == {"equal": 0, "count": 0, "confidence": 0, "nan": 1, "less": 1}
    assert compare("nan", "nan", cwd=tmp_path)[0] == 0


def test_other_lengths_are_said_and_a_missing_step_is_a_difference(tmp_path: Path):
    for name, steps in (("a", (1, 2, 3, 4)), ("short", (2, 3)), ("gap", (1, 2, 4))):
        (tmp_path / name).mkdir()
        append(tmp_path / name / FILE, [1], [{"step": step, "loss": 1.0} for step in steps])
    code, text = compare("a", "short", cwd=tmp_path)
    assert code == 0
    assert "short: steps 2 to 3" in text
    assert "until step 3 (all 2 steps that both have)" in text
    code, text = compare("a", "gap", cwd=tmp_path)
    assert code == 1
    assert "B has no record of 1 steps, the first of them step 3" in text


def test_fp32_figures_come_back_bit_for_bit():
    bits = torch.randint(0, 2**31 - 1, (100_000,), dtype=torch.int32)
    values = bits.view(torch.float32)
    values = values[values.isfinite()]
    text = json.dumps(shortest(values))
    assert torch.tensor(json.loads(text), dtype=torch.float32).equal(values)
    # other bits, other text
    assert len(set(text.split(", "))) == len(values.unique())


def test_a_checksum_shows_one_moved_copy():
    counts_LE = torch.randint(0, 1000, (2, 256))
    before = checksums(counts_LE)
    for source, target in ((0, 1), (255, 0), (100, 101)):
        moved = counts_LE.clone()
        moved[1, source] -= 1
        moved[1, target] += 1
        after = checksums(moved)
        assert after[1] != before[1]
        assert after[0] == before[0]
    # the sums of ranks: the checksum of a sum is the sum of checksums, so it does not depend on the ranks
    [twice] = checksums(2 * counts_LE[:1])
    assert twice == 2 * before[0] % 2**64
