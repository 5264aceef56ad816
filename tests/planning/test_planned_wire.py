"""Bytes between ranks as planned are those that a rank sends."""

from __future__ import annotations

import math

import pytest

from afmoe.planning import Setup
from afmoe.planning.parts import total
from afmoe.planning.states import state_parts
from afmoe.planning.wire import ranks_reached, traffic
from tests.dispatch.ranks import run_ranks
from tests.planning.small_model import config, setup_of
from tests.planning.wire_checks import count_all, setups


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, int]]]:
    return run_ranks(count_all, 2, tmp_path_factory.mktemp("ranks"))


def test_rows_and_counts_on_the_wire_are_those_planned(counted: list[list[dict[str, int]]]) -> None:
    for rank in counted:
        for setup, real in zip(setups(), rank, strict=True):
            planned = {kind.name: kind for kind in traffic(setup)}
            repeated = planned.get("computed again")
            rows = [planned["tokens to experts and back"], planned["their gradients"]]
            again = 0 if repeated is None else repeated.num_bytes - planned["counts"].num_bytes
            assert sum(kind.num_bytes for kind in rows) + again == real["row_bytes"], setup
            times = 1 if repeated is None else 2
            assert times * planned["counts"].num_bytes == real["count_bytes"], setup
            assert sum(kind.num_collectives for kind in planned.values() if kind.name in NAMES) == (
                real["row_calls"] + real["count_calls"]
            ), setup


NAMES = ("tokens to experts and back", "their gradients", "counts", "computed again")


def test_experts_of_a_rank_are_those_planned(counted: list[list[dict[str, int]]]) -> None:
    for setup, real in zip(setups(), counted[1], strict=True):
        assert total(state_parts(setup), "weights", "experts") == real["expert_bytes"]


def test_mxfp8_rows_are_half_of_bf16_ones() -> None:
    def row_bytes(transport: str) -> float:
        kinds = traffic(
            setup_of(config(), num_ranks=2, ep_size=2, dispatch="all_to_all", transport=transport)
        )
        return sum(kind.num_bytes for kind in kinds if kind.name == "tokens to experts and back")

    # 64 codes and 2 scales for 64 numbers
    assert row_bytes("mxfp8") / row_bytes("bf16") == pytest.approx(66 / 128)
    assert row_bytes("bf16") / row_bytes("native") == 0.5


def test_deepep_sends_a_token_once_to_each_rank() -> None:
    setup = setup_of(config(num_experts_per_tok=8), num_ranks=4, ep_size=4, dispatch="deepep")
    assert ranks_reached(setup) == 3
    few = setup_of(config(num_experts=4, num_experts_per_tok=1), num_ranks=4, ep_size=4, dispatch="deepep")
    assert math.isclose(ranks_reached(few), 0.75)


def sent(setup: Setup, name: str) -> float:
    return sum(kind.num_bytes for kind in traffic(setup) if kind.name == name)


def test_gradients_and_weights_travel_as_the_strategy_says() -> None:
    ddp = setup_of(config(), num_ranks=4, strategy="ddp")
    gradients = total(state_parts(ddp), "gradients", "dense")
    assert sent(ddp, "dense gradients") == pytest.approx(2 * 3 / 4 * gradients, abs=1)
    assert sent(ddp.but(accumulate=4), "dense gradients") == sent(ddp, "dense gradients")
    zero = ddp.but(strategy="deepspeed", stage=2)
    assert sent(zero, "dense gradients") == sent(ddp, "dense gradients")
    assert sent(zero.but(accumulate=4), "dense gradients") == 4 * sent(zero, "dense gradients")
    # with as many expert ranks as ranks, nobody else has the same experts
    assert sent(zero.but(ep_size=4, dispatch="all_to_all"), "expert gradients") == 0
    assert sent(zero.but(ep_size=2, dispatch="all_to_all"), "expert gradients") > 0
    weights = total(state_parts(ddp), "weights") - total(state_parts(ddp), "weights", "buffers")
    assert sent(zero, "weights gathered") == pytest.approx(3 / 4 * weights, rel=1e-3)
    assert sent(zero.but(stage=3), "weights gathered") == pytest.approx(2 * 3 / 4 * weights, rel=1e-3)
    alone = setup_of(config())
    assert traffic(alone) == []
