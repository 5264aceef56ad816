"""Ranks that share experts compute what one process does: losses, gradients, norms, steps, counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.parallel.cases import QUICK, zero
from tests.parallel.comparison import OneProcess, assert_equal_to_one, of_rank, result, train
from tests.parallel.worker import Case

TWO = [
    Case(f"z{stage}-{optimizer}-{accumulate}", 2, zero(stage, 2), accumulate=accumulate, optimizer=optimizer)
    for stage in (1, 2)
    for optimizer in ("sgd", "adamw")
    for accumulate in (1, 2)
]
REPLICAS = [
    Case(f"replica-z{stage}-{optimizer}", 2, zero(stage), optimizer=optimizer)
    for stage in (0, 1, 2, 3)
    for optimizer in ("sgd", "adamw")
]
FOUR = [
    Case(f"four-z{stage}-{optimizer}", 4, zero(stage, 2), optimizer=optimizer)
    for stage in (1, 2)
    for optimizer in ("sgd", "adamw")
]
OFFLOADED = [
    Case(f"offload-z{stage}-{accumulate}", 2, zero(stage, 2, offload_optimizer=True), accumulate=accumulate)
    for stage in (1, 2)
    for accumulate in (1, 2)
]


@pytest.mark.parametrize("case", QUICK[:-1], ids=lambda case: case.name)
def test_two_ranks_with_shared_experts_equal_one_process(
    case: Case, two_ranks: Path, one: OneProcess
) -> None:
    reference = one.of(case)
    # the second rank's experts get nothing in the first layer with experts
    assert reference["counts"][0][0][4:].sum() == 0
    assert_equal_to_one(result(two_ranks, case.name), reference, case.optimizer)


def test_four_micro_batches_step_as_one_batch_does(two_ranks: Path) -> None:
    """Lightning and DeepSpeed each divide by their number: 0.25 of the step, if neither is told."""
    whole, parts = result(two_ranks, "sgd-1x4"), result(two_ranks, "sgd-4x1")
    for a, b in zip(whole["norms"], parts["norms"], strict=True):
        assert a == pytest.approx(b, rel=1e-6)  # 2e-7
    for name, weight in whole["weights"].items():
        assert (weight - parts["weights"][name]).norm() <= 1e-6 * weight.norm(), name  # 3e-8


def test_bf16_keeps_router_and_its_reduced_gradients_in_fp32(two_ranks: Path) -> None:
    bf16 = result(two_ranks, "bf16")
    for name, dtype in bf16["dtypes"].items():
        is_fp32 = ".router." in name
        assert dtype == ("torch.float32" if is_fp32 else "torch.bfloat16"), name
    for name, gradient in bf16["gradients"].items():
        if name.endswith("router.gate.weight"):
            assert gradient.dtype == torch.float32
            # experts that get no token have exactly none
            gradient = gradient[gradient != 0]
            rounded = (gradient == gradient.bfloat16()).float().mean()
            assert rounded < 0.05, f"{name} went through bf16"  # 2^-16 by chance


def test_bf16_leaves_out_a_step_with_nan_and_one_of_which_only_the_loss_is_no_number(two_ranks: Path) -> None:
    bf16 = result(two_ranks, "bf16")
    assert [math.isfinite(norm) for norm in bf16["norms"]] == [True, True, False, False]
    # what callbacks that move something after each step go by
    assert bf16["skipped"] == [0.0, 0.0, 1.0, 1.0]
    assert all(weight.isfinite().all() for weight in bf16["weights"].values())


def test_every_rank_holds_its_half_of_the_experts(two_ranks: Path) -> None:
    whole = result(two_ranks, "z1-sgd")["weights"]
    for rank in (0, 1):
        local = of_rank(two_ranks, "z1-sgd", rank)
        for name, shape in of_rank(two_ranks, "z1-sgd", rank, "made").items():
            # before there were any weights
            assert shape == local[name].shape, name
        for name, weight in whole.items():
            is_shared = ".experts." in name
            assert torch.equal(local[name], weight.chunk(2)[rank] if is_shared else weight), name
    experts = [name for name in whole if ".experts." in name]
    mine = sum(of_rank(two_ranks, "z1-sgd", 0)[name].nbytes for name in experts)
    assert mine <= 0.55 * sum(whole[name].nbytes for name in experts)  # 0.50, and gradients alike


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_of_which_only_the_loss_is_no_number_is_left_out_under_every_stage(
    tmp_path: Path, one: OneProcess
) -> None:
    cases = [Case(f"z{stage}", 2, zero(stage), infinite_loss_step=1) for stage in (0, 1, 2, 3)]
    train(cases, tmp_path, world_size=2, timeout_seconds=200)
    for case in cases:
        ours, alone = result(tmp_path, case.name), one.of(case)
        assert ours["skipped"] == alone["skipped"] == [0.0, 1.0, 0.0, 0.0], case.name
        for name, weight in alone["weights"].items():
            assert (ours["weights"][name] - weight).abs().max() <= 1e-5, name  # 1.1e-6, as of all cases


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stage_optimizer_and_accumulation_equals_one_process(tmp_path: Path, one: OneProcess) -> None:
    train(TWO + REPLICAS + OFFLOADED, tmp_path, world_size=2, timeout_seconds=300)
    train(FOUR, tmp_path, world_size=4, timeout_seconds=300)
    for case in TWO + REPLICAS + OFFLOADED + FOUR:
        assert_equal_to_one(result(tmp_path, case.name), one.of(case), case.optimizer)
    for case in OFFLOADED:
        stage, accumulate = case.strategy["stage"], case.accumulate  # pyright: ignore[reportOptionalSubscript]
        kept = result(tmp_path, f"z{stage}-adamw-{accumulate}")["weights"]
        for name, weight in result(tmp_path, case.name)["weights"].items():
            assert (weight - kept[name]).abs().max() <= 1e-6, name  # 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_checkpointing_over_all_to_all_changes_no_bit(tmp_path: Path) -> None:
    """Backward sends tokens again: every rank has to, in the same order, whatever it holds."""
    cases = [
        Case(kind, 2, zero(1, 2), checkpointing=kind, steps=20, max_steps=20)
        for kind in ("none", "full", "selective")
    ]
    train(cases, tmp_path, world_size=2, timeout_seconds=300)
    kept = result(tmp_path, "none")
    assert len(kept["losses"]) == 20
    for kind in ("full", "selective"):
        again = result(tmp_path, kind)
        assert again["losses"] == kept["losses"]
        for part in ("gradients", "weights"):
            for name, tensor in kept[part].items():
                assert torch.equal(again[part][name], tensor), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_stay_bitwise_equal(tmp_path: Path) -> None:
    train(FOUR, tmp_path, world_size=4, timeout_seconds=300)
    for case in FOUR:
        ranks = [of_rank(tmp_path, case.name, rank) for rank in range(4)]
        for name, weight in ranks[0].items():
            if ".experts." in name:
                assert torch.equal(weight, ranks[2][name]), name
                assert torch.equal(ranks[1][name], ranks[3][name]), name
            else:
                assert all(torch.equal(weight, other[name]) for other in ranks), name
