"""Runs of the recipe: in this process where torch is needed, so that it is imported once."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "sft.py"

# a model of 60,000 parameters that trains a step in about 20 ms
TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.moe_intermediate_size=32",
    "model.num_hidden_layers=3",
    "model.head_dim=16",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.num_experts=4",
    "model.sliding_window=16",
    "model.global_attn_every_n_layers=3",
    "data.sequence_length=64",
    "data.batch_size=2",
    "data.num_train_rows=64",
    "data.num_validation_rows=8",
    "trainer.max_steps=4",
    "trainer.val_check_interval=100",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "checkpoint.every_n_steps=2",
    "samples.count=0",
]


@dataclass
class Result:
    code: int
    out: str
    err: str


def load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sft", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., Result]:
    """Call the recipe with overrides, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe()

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
