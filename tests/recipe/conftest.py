"""Runs of the recipe: in this process where torch is needed, so that it is imported once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import load_program
from tests.small_recipe import TINY_MODEL, TINY_REVERSE_TEXT, TINY_RUN

RECIPE = Path(__file__).parents[2] / "recipes" / "sft.py"

# with layers of both kinds of attention, and nothing beside the steps but checkpoints
TINY = [
    *(f"{key}={value}" for key, value in (TINY_MODEL | TINY_REVERSE_TEXT | TINY_RUN).items()),
    "model.global_attn_every_n_layers=3",
    "trainer.val_check_interval=100",
    "checkpoint.every_n_steps=2",
    "samples.count=0",
]


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def sft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., Result]:
    """Call the recipe with overrides, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    recipe = load_program(RECIPE)

    def run(*overrides: str) -> Result:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["sft.py", *overrides])
        root = logging.getLogger()
        handlers = list(root.handlers)
        code = 0
        try:
            recipe.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            root.handlers[:] = handlers
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def sft_process(tmp_path: Path) -> Callable[..., Result]:
    """Run the recipe as a process of its own, as people do."""

    def run(*overrides: str, timeout: float = 120) -> Result:
        environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, str(RECIPE), *overrides],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run
