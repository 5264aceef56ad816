"""The pieces of `moe/dispatch=deepep`, one process."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.dispatch import check_dispatch, make_dispatcher
from afmoe.moe.dispatch.arrivals import MAX_TOKENS, Arrivals, positions
from afmoe.moe.dispatch.deepep_link import chunk_borders
from afmoe.registry import configure
from tests.dispatch import deepep_stand_in

H200 = Hardware(device_type="cuda", name="H200", capability=(9, 0), has_deep_ep=True)

# deep_ep/buffers/legacy.py of DeepEP, commit 189df34 (`deep_ep.Buffer` of versions 1 and 2)
SIGNATURES = {
    "get_dispatch_layout": "topk_idx num_experts previous_event=None async_finish=False "
    "allocate_on_comm_stream=False",
    "dispatch": "x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None "
    "num_tokens_per_expert=None topk_idx=None topk_weights=None expert_alignment=1 num_worst_tokens=0 "
    "config=None previous_event=None async_finish=False allocate_on_comm_stream=False",
    "combine": "x handle topk_weights=None bias=None config=None previous_event=None async_finish=False "
    "allocate_on_comm_stream=False",
    "set_num_sms": "new_num_sms",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_the_stand_in_has_the_librarys_signatures(method: str) -> None:
    parameters = inspect.signature(getattr(deepep_stand_in.Buffer, method)).parameters.values()
    found = [
        parameter.name + ("" if parameter.default is parameter.empty else f"={parameter.default}")
        for parameter in parameters
        if parameter.name != "self"
    ]
    assert " ".join(found) == SIGNATURES[method]


@pytest.mark.parametrize(
    ("changes", "precision", "reason"),
    [
        ({"device_type": "cpu", "capability": None}, "bf16-true", "needs CUDA GPUs of sm_80"),
        ({"capability": (7, 5)}, "bf16-true", "needs CUDA GPUs of sm_80 or newer, this is sm_75"),
        ({"has_deep_ep": False}, "bf16-mixed", "needs the package deep_ep"),
        ({}, "32-true", "precision=bf16-mixed or bf16-true, this is sm_90 with precision 32-true"),
    ],
)
def test_a_machine_without_what_it_needs_is_refused(changes: dict, precision: str, reason: str) -> None:
    hardware = dataclasses.replace(H200, **changes)
    with pytest.raises(MachineError, match=reason) as caught:
        check_dispatch("deepep", hardware=hardware, precision=precision)
    assert "use moe/dispatch=all_to_all" in str(caught.value)


def test_a_machine_with_what_it_needs_is_not() -> None:
    check_dispatch("deepep", hardware=H200, precision="bf16-mixed")
    for name in ("all_to_all", "local"):
        check_dispatch(name, hardware=Hardware(device_type="cpu"), precision="32-true")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sms": 21}, "moe.dispatch.num_sms must be even and at least 2, got 21"),
        ({"token_chunk_size": 0}, "moe.dispatch.token_chunk_size must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure("moe/dispatch", {"name": "deepep", **options})


@pytest.mark.parametrize("name", ["all_to_all", "deepep"])
def test_one_expert_rank_runs_local(name: str) -> None:
    assert make_dispatcher(name, num_experts=8).name == "local"


def test_a_transport_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="transport must be one of native, bf16, mxfp8, got fp8"):
        configure("moe/dispatch", {"name": "all_to_all", "transport": "fp8"})


@pytest.mark.parametrize("name", ["all_to_all", "deepep"])
def test_experts_that_do_not_divide_are_refused(name: str) -> None:
    class ThreeRanks:
        group_name = "three"

        def size(self) -> int:
            return 3

    with pytest.raises(ConfigError, match="num_experts=8 cannot be shared evenly by 3 ranks"):
        make_dispatcher(name, num_experts=8, process_group=ThreeRanks())


def test_chunks_cover_the_tokens_and_late_ones_are_empty() -> None:
    assert chunk_borders(10, 4, 4) == [slice(0, 4), slice(4, 8), slice(8, 10), slice(10, 10)]
    assert chunk_borders(0, 2, 4) == [slice(0, 0)] * 2
    assert chunk_borders(10, 1, None) == [slice(0, 10)]


def test_positions_are_exact_and_in_order_of_the_ranks() -> None:
    found = torch.cat([positions(5, rank, 128, torch.device("cpu")) for rank in range(128)])
    assert (found.long().diff() > 0).all()
    # the last one of all that fit
    last = positions(MAX_TOKENS // 128, 127, 128, torch.device("cpu"))[-2:]
    assert last.long().diff() == 1


def test_arrivals_are_spread_by_expert_and_position_and_summed_by_token() -> None:
    ids_AK = torch.tensor([[1, -1, 0], [-1, -1, -1], [0, -1, -1], [2, 1, 0]])
    positions_A = torch.tensor([7.0, 3.0, 5.0, 1.0])
    arrivals = Arrivals.of(ids_AK, positions_A, num_rows=6, num_local_experts=3)
    assert arrivals.ends_L.tolist() == [3, 5, 6]
    # expert 0: positions 1, 5, 7; expert 1: 1, 7; expert 2: 1
    assert arrivals.token_of_row_R.tolist() == [3, 2, 0, 3, 0, 3]
    tokens_AD = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    weights_AK = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    for spread_weights, sum_weights in ((None, weights_AK), (weights_AK, None)):
        rows_RD = arrivals.spread(tokens_AD, spread_weights)
        total_AD = arrivals.sum(rows_RD, sum_weights)
        expected_AD = tokens_AD * (weights_AK * (ids_AK >= 0)).sum(1, keepdim=True)
        torch.testing.assert_close(total_AD, expected_AD)
        gradient_AD = torch.randn_like(tokens_AD)
        actual, expected = (
            torch.autograd.grad(value, (tokens_AD, weights_AK), gradient_AD)
            for value in (total_AD, expected_AD)
        )
        torch.testing.assert_close(actual, expected)


def test_nothing_arrives() -> None:
    for ids_AK in (torch.full((2, 3), -1), torch.zeros(0, 3, dtype=torch.int64)):
        arrivals = Arrivals.of(ids_AK, torch.zeros(ids_AK.shape[0]), num_rows=0, num_local_experts=3)
        rows_RD = arrivals.spread(torch.randn(ids_AK.shape[0], 4), None)
        assert rows_RD.shape == (0, 4)
        assert torch.equal(arrivals.sum(rows_RD, None), torch.zeros(ids_AK.shape[0], 4))
