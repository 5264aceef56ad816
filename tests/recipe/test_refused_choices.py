"""Choices that this machine cannot run, through the recipe: one line, every reason, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
