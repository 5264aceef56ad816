"""`scripts/check_gpu.py`, as far as it can be tried without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from own_process import ROOT, printed_json, skip_without_triton


def test_on_a_cpu_it_checks_the_emulation_says_what_is_left_and_succeeds(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "scripts" / "check_gpu.py", "--cpu", "--json", report],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not checked: the Triton kernels' results, waiting and speed: this is a CPU" in done.stdout
    found = json.loads(report.read_text())
    # five results of four plugins, and what has to be zero
    assert len(found["checks"]) == 24
    assert all(check["right"] for check in found["checks"])
    assert (found["speed"], found["marks"]) == ([], [])


@pytest.mark.slow
def test_for_a_gpu_every_check_and_every_measurement_runs_and_agrees() -> None:
    skip_without_triton()
    found = printed_json("interpreter_checks.py", "check_gpu", interpret=True)["script"]
    assert found["checks"] > 200
    assert found["checks, wrong"] == 0
    assert found["left out, wrong"] == 0
    # a dense product; layers, products, quantizers, the layout and bf16 alone of two shapes; blocks of one
    assert found["rows of speed"] == 1 + 2 * 26 + 4
    assert found["marks"] == 3
