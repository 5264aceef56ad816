"""Choices that this machine cannot run, or that have nothing to do, through the recipe: both say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afmoe.hardware import has_cxx_compiler
from tests.recipe.conftest import TINY, Result
from tests.recipe.test_mistakes import one_error_line


def test_choices_that_cannot_run_here_are_one_line_with_every_reason(
    sft: Callable[..., Result], tmp_path: Path
) -> None:
    result = sft(*TINY, "attention=flex", "moe/compute=deepgemm_fp8", "run_name=refused")
    line = one_error_line(result)
    for part in ("attention=flex", "use attention=sdpa", "deepgemm_fp8 needs a GPU", "use moe/compute=fp8"):
        assert part in line
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.skipif(not has_cxx_compiler(), reason="without a C++ compiler no layer is compiled")
def test_experts_that_cannot_be_compiled_are_refused_at_the_start(sft: Callable[..., Result]) -> None:
    choices = ("memory.compile_layers=true", "model.hidden_act=mish", "dry_run=true")
    line = one_error_line(sft(*TINY, *choices))
    assert "memory.compile_layers=true cannot compile experts with hidden_act=mish" in line
    assert sft(*TINY, *choices, "moe/compute=reference").code == 0


@pytest.mark.parametrize("name", ["all_to_all", "deepep"])
def test_one_expert_rank_runs_local_dispatch_and_says_so(sft: Callable[..., Result], name: str) -> None:
    result = sft(*TINY, f"moe/dispatch={name}", "dry_run=true")
    assert result.code == 0, result.err
    assert f"local dispatch ({name} has nothing to do: one expert rank)" in " ".join(result.out.split())
