"""`scripts/doctor.py`: a report that says of every choice whether it runs here, and why not."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afmoe.errors import MachineError
from afmoe.hardware import Hardware
from afmoe.moe.cpu_kernels import library
from afmoe.plugins import PLUGINS
from tests.programs import load_program

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "doctor.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def doctor() -> Any:
    return load_program(SCRIPT)


@pytest.fixture(scope="module")
def report(doctor: Any) -> dict[str, Any]:
    return doctor.make_report("cpu")


def test_the_program_reports_within_ten_seconds_of_work_and_names_no_folder() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--accelerator", "cpu", "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    # on the core, not on the wall: this machine may be busy. Measured 4.9 s
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert set(json.loads(done.stdout)) == {
        "versions",
        "machine",
        "environment",
        "device",
        "plugins",
        "outside_plugins",
    }
    assert str(ROOT) not in done.stdout
    assert str(Path.home()) not in done.stdout


def test_every_choice_of_every_group_runs_or_says_why_not(report: dict[str, Any]) -> None:
    for group, names in PLUGINS.items():
        assert set(report["plugins"][group]) >= set(names), group
        for name, verdict in report["plugins"][group].items():
            assert len(verdict) == 1, name
            assert verdict.get("runs") or verdict["reason"], name
    assert report["plugins"]["moe/compute"]["fp8"] == {"runs": "fp8 (e4m3, emulated on cpu)"}


def test_the_report_describes_this_machine(report: dict[str, Any]) -> None:
    import torch

    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["torch_threads"] == torch.get_num_threads()
    assert report["machine"]["memory_gib"] > 0.1
    # set for all tests
    assert report["machine"]["is_offline"]
    assert report["environment"]["HF_HUB_OFFLINE"] == "1"


def test_the_markdown_holds_a_line_for_each_choice(doctor: Any, report: dict[str, Any]) -> None:
    lines = doctor.as_markdown(report)
    assert not any("\n" in line for line in lines)
    text = "\n".join(lines)
    for group, names in report["plugins"].items():
        assert all(f"| `{group}={name}` |" in text for name in names)
    assert all(line.count("|") == 3 for line in lines if line.startswith("|"))


def test_a_choice_that_another_machine_cannot_run_is_explained(doctor: Any) -> None:
    old = Hardware(device_type="cuda", name="GPU", capability=(7, 0), has_triton=True)
    for name in ("native", "bf16", "fp8", "mxfp8"):
        assert "sm_70" in doctor.judge("moe/compute", name, old)["reason"]
    assert doctor.judge("moe/compute", "reference", old)["runs"]


def test_a_compiler_that_builds_nothing_that_runs_is_told(
    doctor: Any, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_load_once", lambda: MachineError("it says no"))
    machine = report["machine"] | {"has_c_compiler": True, "has_cpu_kernels": doctor.has_cpu_kernels()}
    (line,) = [line for line in doctor.as_markdown(report | {"machine": machine}) if "| C compiler" in line]
    assert "cannot be kept or run" in line


def test_a_plugin_that_cannot_be_imported_is_explained(
    doctor: Any, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PLUGINS["data"], "needs_more", "needs_more")
    verdict = doctor.judge("data", "needs_more", Hardware(device_type="cpu"))
    assert "No module named 'a_package_that_is_not_there'" in verdict["reason"]


def test_a_broken_outside_package_is_named(
    doctor: Any, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    information = tmp_path / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[afmoe.plugins]\nbroken = broken_plugin\n")
    (tmp_path / "broken_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.outside_plugins()
    assert found["broken"] == "ZeroDivisionError: division by zero"
    assert "**fails to import**: ZeroDivisionError" in "\n".join(
        doctor.as_markdown(report | {"outside_plugins": found})
    )


def test_a_mistake_ends_in_one_line() -> None:
    done = run("--accelerator", "tpu")
    assert done.returncode == 1
    assert done.stderr.startswith("error: argument --accelerator: invalid choice: 'tpu'")
    assert done.stderr.count("\n") == 1
