"""`scripts/benchmark_experts.py`: every choice timed in one run, at sizes small enough for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SIZES = "--hidden-size 32 --num-experts 4 --top-k 2 --intermediate-size 16 --tokens 64 --threads 1 --rounds 2"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/benchmark_experts.py", *SIZES.split(), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_table_and_the_json_hold_every_choice() -> None:
    done = run("--plugins", "native,fp8", "--json")
    assert done.returncode == 0, done.stderr
    timings = {timing["name"]: timing["milliseconds"] for timing in json.loads(done.stdout)["timings"]}
    assert list(timings) == ["transformers eager", "transformers grouped_mm", "native", "fp8"]
    assert all(len(times) == 2 and min(times) > 0 for times in timings.values())
    done = run("--plugins", "reference,native", "--no-transformers", "--cpu-time")
    assert "| native |" in done.stdout
    assert "cpu time" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("| 1.00, 1.00 |")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plugins", "naive"], "error: unknown moe/compute=naive; choose one of: native"),
        (["--plugins", "deepgemm_fp8"], "error: moe/compute=deepgemm_fp8 needs a GPU of sm_90 or sm_100"),
        (["--top-k", "5"], "error: --top-k must not exceed --num-experts=4, got 5"),
        (["--cpu-time", "--threads", "2"], "error: --cpu-time sees one thread; add --threads 1"),
        (["--rounds", "1"], "error: --rounds must be at least 2, got 1"),
    ],
)
def test_a_mistake_ends_in_one_line(options: list[str], message: str) -> None:
    done = run(*options, "--no-transformers")
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
