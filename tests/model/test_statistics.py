"""Counting what the routers do, and the metrics of the counts."""

from __future__ import annotations

import math

import pytest
import torch
from parity import SMALL, our_model, random_ids
from torch.utils.checkpoint import checkpoint

from afmoe import iter_moe_blocks
from afmoe.moe.statistics import (
    count_routing,
    dead_experts,
    load_entropy,
    max_violation,
    reset_counts,
)


def test_every_real_token_is_counted_once_per_chosen_expert():
    model = our_model()
    ids = random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    with count_routing(model):
        model(ids, attention_mask=mask)
        model(ids)
    for block in iter_moe_blocks(model):
        assert block.statistics.counts_E.dtype == torch.int64
        assert block.statistics.counts_E.sum().item() == (50 + 60) * 2
        assert block.statistics.num_tokens.item() == 110


def test_counts_are_those_of_the_chosen_experts():
    model = our_model()
    block = next(iter_moe_blocks(model))
    hidden = torch.randn(1, 40, SMALL["hidden_size"])
    with count_routing(model):
        block(hidden)
    expected = torch.bincount(block.router(hidden[0]).expert_ids_TK.flatten(), minlength=8)
    assert torch.equal(block.statistics.counts_E, expected)


def test_validation_generation_and_recomputation_are_not_counted():
    model = our_model()
    ids = random_ids(1, 12)
    block = next(iter_moe_blocks(model))
    model(ids)
    assert block.statistics is None
    hidden = torch.randn(1, 12, SMALL["hidden_size"], requires_grad=True)
    with count_routing(model):
        output, _ = checkpoint(block, hidden, use_reentrant=False)
    # runs the block a second time
    output.sum().backward()
    model(ids)
    model.generate(ids, 3)
    assert block.statistics.num_tokens.item() == 12


def test_counting_stops_when_the_forward_fails():
    model = our_model()
    with pytest.raises(ValueError, match="exactly one"), count_routing(model):
        model()
    model(random_ids(1, 4))
    assert all(block.statistics is None for block in iter_moe_blocks(model))


def test_counting_changes_neither_outputs_nor_gradients():
    model = our_model()
    ids = random_ids(1, 12)
    results = []
    for is_counted in (False, True):
        model.zero_grad()
        if is_counted:
            with count_routing(model):
                output = model(ids, labels=ids)
        else:
            output = model(ids, labels=ids)
        output.loss.backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def test_confidence_is_the_share_of_the_chosen_scores_before_the_bias():
    model = our_model()
    block = next(iter_moe_blocks(model))
    block.router.selection_bias.copy_(torch.linspace(-5, 5, 8))
    hidden = torch.randn(2, 20, SMALL["hidden_size"])
    mask = torch.rand(40) < 0.7
    with count_routing(model):
        block(hidden, mask)
    scores = torch.sigmoid(hidden.flatten(0, 1) @ block.router.gate.weight.T)
    # the bias leaves no choice: always the last two experts
    expected = (scores[:, 6:].sum(-1) / scores.sum(-1))[mask].mean()
    assert torch.allclose(block.statistics.confidence, expected, rtol=1e-6)
    reset_counts(model)
    assert block.statistics.confidence.item() == 0
    assert block.statistics.counts_E.sum().item() == 0


def test_a_balanced_router_deals_the_real_tokens_out_in_turn():
    model = our_model(num_experts_per_tok=3)
    for block in iter_moe_blocks(model):
        block.router.balanced = True
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    # 32 real tokens, 96 copies, 12 for each of 8 experts
    mask[0, :8] = 0
    with count_routing(model):
        model(ids, attention_mask=mask)
    for block in iter_moe_blocks(model):
        assert block.statistics.counts_E.tolist() == [12] * 8
    router = next(iter_moe_blocks(model)).router
    routing = router(torch.randn(4, SMALL["hidden_size"]), torch.tensor([True, False, True, True]))
    assert routing.expert_ids_TK[[0, 2, 3]].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    chosen = routing.scores_TE.gather(1, routing.expert_ids_TK)
    assert torch.allclose(routing.weights_TK, 2.8 * chosen / chosen.sum(1, keepdim=True))


def test_metrics_of_known_counts():
    counts = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [8, 4, 4, 0], [0, 0, 0, 0]])
    assert max_violation(counts).tolist() == [0, 3, 1, 0]
    assert dead_experts(counts).tolist() == [0, 3, 1, 4]
    entropy = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25)) / math.log(4)
    assert load_entropy(counts).tolist() == pytest.approx([1, 0, entropy, 0])
    assert max_violation(counts[2]).item() == 1


def test_max_violation_sees_hot_experts_that_dropping_the_busiest_hides():
    # 8 hot experts of 128: leaving the 8 busiest out would report 0.14
    counts = torch.full((128,), 100)
    counts[:8] = 312
    assert max_violation(counts).item() == pytest.approx(312 / counts.double().mean().item() - 1)
