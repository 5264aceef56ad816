"""Ranks that share experts start from trained weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.test_launching import SHARED, TORCHRUN, run
from tests.recipe.conftest import RECIPE, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_ranks_that_read_their_own_experts_only_train_as_one_process_does(tmp_path: Path) -> None:
    alone = [*TINY, "data.batch_size=2", "trainer.accelerator=cpu", "trainer.devices=1"]
    trained = "model.pretrained=outputs/first/export"
    for command in (
        [str(RECIPE), *alone, "run_name=first"],
        [str(RECIPE), *alone, "run_name=alone", trained],
        [*TORCHRUN, str(RECIPE), *SHARED, "run_name=shared", trained],
    ):
        result = run(command, tmp_path)
        assert result.code == 0, result.err
    first, one, two = (
        json.loads((tmp_path / "outputs" / name / "metrics.json").read_text())
        for name in ("first", "alone", "shared")
    )
    assert one["train/loss"] < first["train/loss"]
    for name in ("train/loss", "val/loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-6)
