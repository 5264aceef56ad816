"""scripts/plan.py: the recipe's overrides in, a plan or one line out."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afmoe.errors import script_errors
from afmoe.planning import GIB
from tests.programs import load_program

ROOT = Path(__file__).parents[2]
MINI = [
    "model=trinity_mini",
    "model.vocab_size=200192",
    "trainer.devices=8",
    "trainer/strategy=deepspeed",
    "trainer.strategy.ep_size=4",
    "trainer.strategy.stage=1",
    "moe/dispatch=all_to_all",
    "moe/compute=fp8",
    "trainer.precision=bf16-mixed",
    "data.sequence_length=2048",
    "data.batch_size=4",
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_program(ROOT / "scripts" / "plan.py")


@pytest.fixture
def plan(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> Callable[..., str]:
    """What the program prints, or its error line, in an empty folder that it has to leave empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
        root = logging.getLogger()
        handlers = list(root.handlers)
        try:
            with script_errors():
                script.main()
        except SystemExit:
            # the error line says it
            pass
        finally:
            root.handlers[:] = handlers
        assert not list(tmp_path.iterdir())
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("error:")]
        assert len(lines) <= 1
        return lines[0] if lines else out

    return run


def test_a_plan_is_for_the_command_that_will_run(plan: Callable[..., str]) -> None:
    found = json.loads(plan("trainer.accelerator=cpu", "--json", "--memory-gib", "8"))
    assert found["setup"]["device_type"] == "cpu"
    assert found["fits"]
    weights = {part["name"]: part["num_bytes"] for part in found["parts"] if part["section"] == "weights"}
    # 1.811 million parameters, as the first screen of the README says: the tokenizer has 267 tokens
    assert (weights["dense"] + weights["experts"]) / 4 == pytest.approx(1.811e6, abs=500)
    assert found["traffic"] == []


def test_parts_add_up_to_the_peak(plan: Callable[..., str]) -> None:
    found = json.loads(plan(*MINI, "--json"))
    times = {
        when: sum(
            part["num_bytes"] for part in found["parts"] if part["when"] == when and not part["on_host"]
        )
        for when in ("always", "backward", "step")
    }
    assert found["peak_bytes"] == times["always"] + max(times["backward"], times["step"])
    assert found["fits"] == (found["peak_bytes"] <= 80 * GIB)


def check_changes(plan: Callable[..., str], base: list[str], kept: slice) -> None:
    found = json.loads(plan(*base, "--json"))
    assert not found["fits"]
    changes = found["changes"]
    saved = [change["saved_bytes"] for change in changes]
    assert saved == sorted(saved, reverse=True)
    assert len(changes) >= 6
    for change in changes[kept]:
        given = {one.split("=")[0]: one for one in [*base, *change["overrides"].split()]}
        planned = json.loads(plan(*given.values(), "--json"))
        assert planned["peak_bytes"] == change["peak_bytes"], change
        assert found["peak_bytes"] - planned["peak_bytes"] == change["saved_bytes"], change


def test_a_change_saves_what_a_plan_with_it_says(plan: Callable[..., str]) -> None:
    check_changes(plan, MINI, slice(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [MINI, ["model=trinity_nano", "model.vocab_size=200192", "trainer.devices=4", "optim=muon"]],
    ids=["shared experts", "plain"],
)
def test_every_change_saves_what_a_plan_with_it_says(plan: Callable[..., str], base: list[str]) -> None:
    check_changes(plan, base, slice(None))


def test_the_screen_says_what_does_not_fit_and_what_would(plan: Callable[..., str]) -> None:
    screen = plan(*MINI)
    assert "does not fit" in screen
    assert "memory.activation_checkpointing=full" in screen
    assert "tokens to experts and back" in screen
    assert "ep_size 4" in screen
    assert "fits: " in plan(*MINI, "memory.activation_checkpointing=full", "--memory-gib", "300")


def test_imbalance_costs_memory_and_nothing_on_the_wire(plan: Callable[..., str]) -> None:
    even, uneven = (json.loads(plan(*MINI, "--json", "--imbalance", text)) for text in ("1", "1.5"))
    assert uneven["peak_bytes"] > even["peak_bytes"]
    assert uneven["traffic"] == even["traffic"]


def test_mistakes_are_one_line(plan: Callable[..., str]) -> None:
    deepspeed = ["trainer/strategy=deepspeed", "trainer.devices=8"]
    mistakes: dict[tuple[str, ...], str] = {
        (*deepspeed, "trainer.strategy.ep_size=3", "moe/dispatch=all_to_all"): "ep_size=3 must divide",
        (*deepspeed, "trainer.strategy.ep_size=8", "moe/dispatch=all_to_all", "model.num_experts=12"): (
            "ep_size=8 must divide model.num_experts=12"
        ),
        (*deepspeed, "trainer.strategy.ep_size=8"): "use moe/dispatch=all_to_all",
        (*deepspeed, "trainer.strategy.stage=4"): "stage must be 0, 1, 2 or 3, got 4",
        (*deepspeed, "optim=muon", "trainer.strategy.stage=3"): "optim=muon works on whole matrices",
        ("moe.compute=fp8",): "moe/compute=fp8",
        ("model=trinity_mimi",): "trinity_mini",
        ("model.num_exprts=8",): "num_experts",
        ("model.vocab_size=10",): "model.vocab_size=10 is smaller than the tokenizer",
        ("model.pretrained=nowhere",): "model.pretrained=nowhere",
        ("optim.freeze=[zzz]",): "optim.freeze: no parameter is called zzz; the closest: ",
        ("callbacks=[freeze_router]", "optim.rates={*.router.*:0.5}"): "*.router.* is frozen",
        ("--jsn",): "--jsn",
        ("-m",): "-m",
        ("--imbalance", "0.5"): "at least 1, got 0.5",
        ("--memory-gib", "0"): "--memory-gib must be positive, got 0",
    }
    for arguments, words in mistakes.items():
        line = plan(*arguments)
        assert line.startswith("error: "), arguments
        assert words in line, arguments


def test_the_arithmetic_loads_no_torch() -> None:
    code = "import sys, afmoe.planning.smallest, afmoe.planning.advice; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_table_of_the_page_is_what_the_program_prints(plan: Callable[..., str]) -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert plan("--table").strip() in page


def test_a_run_is_refused_by_what_its_ranks_share(script: ModuleType) -> None:
    from afmoe.assembly import training_memory_gib
    from afmoe.hardware import Hardware
    from afmoe.planning.shape_of_run import planned_shape

    hardware = Hardware(device_type="cuda", num_devices=8, memory_gib=80.0)
    needed: list[Any] = []

    def measure(run: Any) -> None:
        needed.append(training_memory_gib(run, planned_shape(run), hardware))

    plain = ["model=trinity_mini", "model.vocab_size=200192", "trainer.precision=bf16-true"]
    shared = ["trainer/strategy=deepspeed", "trainer.strategy.stage=2", "moe/dispatch=all_to_all"]
    for overrides in (plain, [*plain, *shared], [*plain, *shared, "trainer.strategy.ep_size=8"]):
        script.call(measure, overrides)
    whole, zero, experts = needed
    # 26.12 billion parameters: 2 + 2 + 12 bytes each, or 2 and an eighth of 16, or of the experts all of it
    assert whole == pytest.approx(26.124e9 * 16 / GIB, rel=0.001)
    assert zero == pytest.approx(26.124e9 * (2 + 16 / 8) / GIB, rel=0.001)
    assert experts < zero
