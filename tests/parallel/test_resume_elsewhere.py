"""A checkpoint belongs to no number of ranks: the same goes on bit for bit, another to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from afmoe.checkpoint.run import read_checkpoint
from tests.parallel.cases import ALONE, ROUTER, SHARED, half, rest, zero
from tests.parallel.comparison import OneProcess, assert_equal_to_one, result, train
from tests.parallel.worker import Case, run

ELSEWHERE = [
    Case("ep2z2", 2, zero(2, 2)),
    Case("ep1", 2, zero(2)),
    Case("z0", 2, zero(0)),
    Case("z3", 2, zero(3)),
    Case("offload", 2, zero(1, 2, offload_optimizer=True)),
]


def test_shared_experts_go_on_bitwise_and_in_one_process(two_ranks: Path, one: OneProcess) -> None:
    for case in (SHARED, ROUTER):
        whole, resumed = result(two_ranks, case.name), result(two_ranks, f"{case.name}-{case.name}")
        assert resumed["losses"] == whole["losses"][2:]
        for name, weight in whole["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name
    reference = one.of(SHARED)
    assert_equal_to_one(result(two_ranks, "alone-shared"), reference, "adamw")
    assert_equal_to_one(run(rest(ALONE, "shared", two_ranks))[0], reference, "adamw")
    _assert_same_form(two_ranks, "shared", "alone")


def _assert_same_form(folder: Path, *names: str) -> None:
    """Two checkpoints hold the same keys, shapes and types."""
    shapes = []
    for name in names:
        state = read_checkpoint(folder / name / "step-000002")
        optimizer = state["optimizer_states"][0]
        shapes.append(
            (
                {key: (value.shape, value.dtype) for key, value in state["state_dict"].items()},
                {
                    (number, key): value.shape
                    for number, one in optimizer["state"].items()
                    for key, value in one.items()
                },
                [group["parameter_names"] for group in optimizer["param_groups"]],
                [group.keys() for group in optimizer["param_groups"]],
                state["lr_schedulers"][0].keys(),
            )
        )
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stage_and_expert_size_goes_on_from_every_other(tmp_path: Path, one: OneProcess) -> None:
    cases = [SHARED, *ELSEWHERE]
    run(half(ALONE, tmp_path))
    saved = [half(case, tmp_path) for case in cases]
    pairs = [rest(to, source.name, tmp_path) for source in cases for to in cases]
    alone = [rest(case, "alone", tmp_path) for case in cases]
    train(saved + pairs + alone, tmp_path, world_size=2, timeout_seconds=500)
    reference = one.of(SHARED)
    for case in pairs + alone:
        assert_equal_to_one(result(tmp_path, case.name), reference, "adamw")
    for case in cases:
        assert_equal_to_one(run(rest(ALONE, case.name, tmp_path))[0], reference, "adamw")
