"""Two processes do what one does: same packs a step, same loss, same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afmoe.run_difference import compare
from afmoe.step_records import read_records
from tests.recipe.conftest import TINY, Result
from tests.recipe.test_runs import weights


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_equal_one(sft_process: Callable[..., Result], tmp_path: Path) -> None:
    one = ["run_name=one", "data.batch_size=4", "trainer.max_steps=6"]
    two = [
        "run_name=two",
        "data.batch_size=2",
        "trainer.max_steps=3",
        "trainer.devices=2",
        "trainer/strategy=ddp",
    ]
    constant = [
        *TINY,
        "scheduler.decay_fraction=0.0",
        "trainer.accelerator=cpu",
        "callbacks=[load_balance,selection_bias]",
        "optim.freeze=['*.k_norm.*']",
    ]
    assert sft_process(*constant, *one).code == 0
    first = sft_process(*constant, *two, timeout=180)
    assert first.code == 0, first.err
    # the second half, resumed in two processes
    second = sft_process(*constant, *two, "trainer.max_steps=6", timeout=180)
    assert second.code == 0, second.err
    assert "continuing outputs/two from step 3" in second.out + second.err
    outputs = tmp_path / "outputs"
    single, parallel = (json.loads((outputs / name / "metrics.json").read_text()) for name in ("one", "two"))
    for name in ("train/tokens", "train/steps", "val/reverse_exact", "moe/max_violation"):
        assert single[name] == parallel[name], name
    # measured 2e-7: sums in another order
    for name in ("train/loss", "val/loss"):
        assert single[name] == pytest.approx(parallel[name], rel=1e-5), name
    # step by step, sums over the ranks: every routed copy, figures to the order of sums (measured 2e-7)
    records = [read_records(outputs / name / "steps.jsonl") for name in ("one", "two")]
    found = compare(*records)
    assert found is not None
    assert found.steps == [1, 2, 3, 4, 5, 6]
    assert "counts" not in found.largest
    assert found.is_within(1e-5), found.largest
    ours, theirs = weights(outputs / "one"), weights(outputs / "two")
    for name, tensor in ours.items():
        difference = torch.linalg.vector_norm(tensor - theirs[name])
        # measured 3e-6 after 6 steps of AdamW, which divides by small gradients
        assert difference <= 1e-4 * torch.linalg.vector_norm(tensor).clamp(min=1e-3), name
        if name.endswith("selection_bias"):
            # decided by whole numbers, the counts of all ranks
            assert tensor.any()
            assert torch.equal(tensor, theirs[name]), name
    assert sorted(path.name for path in outputs.iterdir()) == ["one", "two"], "further ranks make no folder"
