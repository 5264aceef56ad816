"""Every dispatcher keeps the contract of `afmoe.moe.dispatch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from afmoe.errors import ConfigError
from afmoe.moe.dispatch.copies import sum_by_bags, sum_by_gather
from afmoe.registry import build, configure

T, K, E, D = 37, 3, 8, 16


@pytest.fixture
def dispatcher() -> Any:
    return build(configure("moe/dispatch", "local"), num_experts=E)


def random_routing(num_experts_used: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts of each (different ones) and their weights."""
    ids_TK = torch.rand(T, num_experts_used).argsort(1)[:, :K]
    return torch.randn(T, D), ids_TK, torch.rand(T, K)


def naive(tokens_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, mask_T: Tensor, experts: Any) -> Tensor:
    """Each token on its own: sum over its experts of weight * expert(token)."""
    # depends on both operands even where every token is masked
    out_TD = 0.0 * tokens_TD + 0.0 * weights_TK.sum()
    for t in mask_T.nonzero().flatten().tolist():
        for k in range(K):
            out_TD[t] += weights_TK[t, k] * experts(tokens_TD[t], ids_TK[t, k])
    return out_TD


def scale_by_expert(x: Tensor, expert: Tensor) -> Tensor:
    return x * (expert + 1)


def run_layer(
    dispatcher: Any, tokens_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, mask_T: Tensor | None
) -> Tensor:
    """Dispatch, an expert e that multiplies by e + 1 (zero on padding rows), combine."""
    dispatched = dispatcher.dispatch(tokens_TD, weights_TK, dispatcher.plan(ids_TK, mask_T))
    rows_R = torch.arange(dispatched.rows_RD.shape[0])
    expert_R = torch.searchsorted(dispatched.offsets_L, rows_R, right=True)
    factor_R = torch.where(expert_R < E, expert_R + 1, 0).to(tokens_TD.dtype)
    return dispatcher.combine(dispatched.rows_RD * factor_R[:, None], dispatched.state)


@pytest.mark.parametrize("num_experts_used", [E, K])
@pytest.mark.parametrize("masked", [[], [0, 5, T - 1], list(range(T))], ids=["none", "some", "all"])
def test_outputs_and_gradients_equal_a_sum_token_by_token(
    dispatcher: Any, num_experts_used: int, masked: list[int]
) -> None:
    tokens_TD, ids_TK, weights_TK = random_routing(num_experts_used)
    mask_T = torch.ones(T, dtype=torch.bool)
    mask_T[masked] = False
    leaves = [tokens_TD.double().requires_grad_(), weights_TK.double().requires_grad_()]
    actual_TD = run_layer(dispatcher, leaves[0], ids_TK, leaves[1], mask_T if masked else None)
    expected_TD = naive(leaves[0], ids_TK, leaves[1], mask_T, scale_by_expert)
    grad_TD = torch.randn(T, D, dtype=torch.float64)
    actual = [actual_TD, *torch.autograd.grad(actual_TD, leaves, grad_TD)]
    expected = [expected_TD, *torch.autograd.grad(expected_TD, leaves, grad_TD)]
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
        assert (value[masked] == 0).all()


def test_weights_on_the_experts_input_are_not_on_their_output(dispatcher: Any) -> None:
    tokens_TD, ids_TK, weights_TK = random_routing()
    mask_T = torch.rand(T) > 0.2
    leaves = [tokens_TD.double().requires_grad_(), weights_TK.double().requires_grad_()]
    plan = dispatcher.plan(ids_TK, mask_T)
    dispatched = dispatcher.dispatch(*leaves, plan, score_before_experts=True)
    rows_RD = dispatched.rows_RD.square()
    actual_TD = dispatcher.combine(rows_RD, dispatched.state)
    squares_TK = (leaves[1].square() * mask_T[:, None]).sum(1, keepdim=True)
    expected_TD = leaves[0].square() * squares_TK
    torch.testing.assert_close(actual_TD, expected_TD, rtol=1e-12, atol=1e-12)
    actual, expected = (
        torch.autograd.grad(value, leaves, torch.ones_like(tokens_TD, dtype=torch.float64))
        for value in (actual_TD, expected_TD)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_each_real_copy_lies_once_in_the_rows_of_its_expert(dispatcher: Any) -> None:
    tokens_TD, ids_TK, weights_TK = random_routing()
    mask_T = torch.rand(T) > 0.2
    dispatched = dispatcher.dispatch(tokens_TD, weights_TK, dispatcher.plan(ids_TK, mask_T))
    assert dispatched.rows_RD.shape == (T * K, D)
    assert dispatched.offsets_L.dtype == torch.int32
    assert dispatched.offsets_L[-1] == mask_T.sum() * K
    start = 0
    for expert, end in enumerate(dispatched.offsets_L.tolist()):
        wanted = tokens_TD[(ids_TK == expert).any(1) & mask_T]
        torch.testing.assert_close(dispatched.rows_RD[start:end], wanted, rtol=0, atol=0)
        start = end


def test_counts_are_the_routed_copies_of_real_tokens(dispatcher: Any) -> None:
    _, ids_TK, _ = random_routing()
    mask_T = torch.rand(T) > 0.5
    counts_E = dispatcher.plan(ids_TK, mask_T).counts_E
    assert counts_E.dtype == torch.int64
    assert counts_E.tolist() == [int((ids_TK[mask_T] == expert).sum()) for expert in range(E)]
    assert dispatcher.plan(ids_TK, None).counts_E.sum() == T * K


def test_the_order_of_a_tokens_experts_changes_only_rounding(dispatcher: Any) -> None:
    tokens_TD, ids_TK, weights_TK = random_routing()
    expected = run_layer(dispatcher, tokens_TD, ids_TK, weights_TK, None)
    flipped = run_layer(dispatcher, tokens_TD, ids_TK.flip(1), weights_TK.flip(1), None)
    # measured 1.2e-7 of the largest entry
    torch.testing.assert_close(flipped, expected, rtol=0, atol=4e-7 * expected.abs().max().item())


def test_bf16_rows_are_weighed_and_summed_in_fp32(dispatcher: Any) -> None:
    tokens_TD, ids_TK, weights_TK = random_routing()
    tokens_TD = tokens_TD.bfloat16()
    mask_T = torch.ones(T, dtype=torch.bool)
    actual = run_layer(dispatcher, tokens_TD, ids_TK, weights_TK, None)
    # the rows themselves are bf16, so the expert rounds before the weighing
    expected = naive(tokens_TD.float(), ids_TK, weights_TK, mask_T, round_and_scale)
    assert actual.dtype == torch.bfloat16
    # one rounding to bf16 at the end: half of 2^-8, relative
    torch.testing.assert_close(actual.float(), expected, rtol=2.0**-8, atol=1e-6)


def round_and_scale(x: Tensor, expert: Tensor) -> Tensor:
    return scale_by_expert(x, expert).bfloat16().float()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_two_ways_to_sum_a_tokens_copies_agree(dtype: torch.dtype, weighted: bool) -> None:
    rows_ND, copy_to_row_TK = torch.randn(T * K, D).to(dtype), torch.randperm(T * K).view(T, K)
    weights_TK = torch.rand(T, K) if weighted else None
    by_bags = sum_by_bags(rows_ND, copy_to_row_TK, weights_TK)
    by_gather = sum_by_gather(rows_ND, copy_to_row_TK, weights_TK)
    assert by_bags.dtype == by_gather.dtype == dtype
    # measured 0, 4.8e-7 and 3.9e-3, one step of bf16
    tolerance = {torch.float64: 3e-15, torch.float32: 1.5e-6, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(by_bags, by_gather, rtol=0, atol=tolerance)


def test_a_batch_without_tokens_works(dispatcher: Any) -> None:
    plan = dispatcher.plan(torch.zeros(0, K, dtype=torch.int64), None)
    dispatched = dispatcher.dispatch(torch.randn(0, D), torch.zeros(0, K), plan)
    assert dispatched.offsets_L.tolist() == [0] * E
    assert dispatcher.combine(dispatched.rows_RD, dispatched.state).shape == (0, D)


def test_local_dispatch_refuses_experts_shared_by_several_ranks() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match="2 ranks share them; use moe/dispatch=all_to_all"):
        build(configure("moe/dispatch", "local"), num_experts=E, process_group=TwoRanks())
