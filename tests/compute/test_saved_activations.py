"""What an MoE layer keeps for backward, in bytes a token, and that keeping less changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import CPU, deviation
from torch import Tensor
from transformers.models.afmoe.configuration_afmoe import AfmoeConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeExperts

from afmoe.moe.compute import ExpertShape
from afmoe.moe.experts import Experts
from afmoe.registry import build, configure

T, K, E, D, F = 96, 4, 8, 256, 128


def routing() -> tuple[Tensor, Tensor]:
    return torch.rand(T, E).argsort(1)[:, :K], torch.rand(T, K).requires_grad_()


def saved_bytes_per_token(layer: Callable[[Tensor], Tensor], *kept_anyway: Tensor) -> float:
    """Of the storages that autograd saves in a forward, each once, without the weights and the tokens."""
    tokens_TD = torch.randn(T, D).requires_grad_()
    known = {tensor.untyped_storage().data_ptr() for tensor in (tokens_TD, *kept_anyway)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(tokens_TD)
    assert output.requires_grad
    return sum(saved.values()) / T


def our_layer(name: str) -> tuple[Experts, Callable[[Tensor], Tensor]]:
    shape = ExpertShape(num_experts=E, hidden_size=D, intermediate_size=F, activation="silu")
    compute = build(configure("moe/compute", name), shape=shape, hardware=CPU)
    experts = Experts(E, D, F, compute)
    experts.init_weights(0.06)
    dispatcher = build(configure("moe/dispatch", "local"), num_experts=E)
    ids_TK, weights_TK = routing()

    def layer(tokens_TD: Tensor) -> Tensor:
        dispatched = dispatcher.dispatch(tokens_TD, weights_TK, dispatcher.plan(ids_TK, None))
        rows_RD = experts(dispatched.rows_RD, dispatched.offsets_L, dispatched.source)
        return dispatcher.combine(rows_RD, dispatched.state)

    return experts, layer


def plain_layer() -> tuple[AfmoeExperts, Callable[[Tensor], Tensor]]:
    """transformers' loop over experts, each product and each activation a node of its own."""
    sizes: dict[str, Any] = {"hidden_size": D, "num_experts": E, "moe_intermediate_size": F}
    config = AfmoeConfig(num_experts_per_tok=K, **sizes)
    config._experts_implementation = "eager"
    experts = AfmoeExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.06)
    ids_TK, weights_TK = routing()
    return experts, lambda tokens_TD: experts(tokens_TD, ids_TK, weights_TK)


@pytest.mark.parametrize("name", ["native", "fp8", "mxfp8"])
def test_a_layer_keeps_at_most_three_fifths_of_the_plain_formulation(name: str) -> None:
    experts, layer = our_layer(name)
    ours = saved_bytes_per_token(layer, *experts.parameters())
    plain_experts, plain = plain_layer()
    theirs = saved_bytes_per_token(plain, *plain_experts.parameters())
    # a token's K copies: the two products before the activation and y in fp32, a weight, two indices; the
    # offsets are next to nothing. docs/numerics.md states it
    assert ours == pytest.approx(K * (4 * (D + 2 * F) + 4 + 2 * 8), rel=0.01)
    # measured 0.40
    assert ours <= 0.6 * theirs


@pytest.mark.parametrize("name", ["native", "fp8", "mxfp8"])
def test_experts_whose_first_weights_are_frozen_keep_no_rows(name: str) -> None:
    experts, _ = our_layer(name)
    offsets_E = torch.arange(1, E + 1, dtype=torch.int32) * (T // E)

    def layer(tokens_TD: Tensor) -> Tensor:
        # rows of its own, which would be kept
        return experts(tokens_TD * 2.0, offsets_E)

    trained = saved_bytes_per_token(layer, *experts.parameters())
    for weight in (experts.gate_proj, experts.up_proj):
        assert weight is not None
        weight.requires_grad_(False)
    frozen = saved_bytes_per_token(layer, *experts.parameters())
    assert trained - frozen == pytest.approx(4 * D)


@pytest.mark.parametrize("name", ["reference", "native", "bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_gathered_again_in_backward_are_the_rows_of_forward(name: str, autocast: bool) -> None:
    experts, _ = our_layer(name)
    dispatcher = build(configure("moe/dispatch", "local"), num_experts=E)
    ids_TK, weights_TK = routing()
    tokens_TD = torch.randn(T, D).requires_grad_()
    grad_RD = torch.randn(T * K, D)
    results = []
    for with_source in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            dispatched = dispatcher.dispatch(tokens_TD, weights_TK, dispatcher.plan(ids_TK, None))
            source = dispatched.source if with_source else None
            rows_RD = experts(dispatched.rows_RD, dispatched.offsets_L, source)
        leaves = [tokens_TD, *experts.parameters()]
        results.append(torch.autograd.grad(rows_RD, leaves, grad_RD.to(rows_RD.dtype)))
    assert all(torch.equal(kept, gathered) for kept, gathered in zip(*results, strict=True))


def test_a_wrong_source_would_be_seen() -> None:
    experts, _ = our_layer("native")
    dispatcher = build(configure("moe/dispatch", "local"), num_experts=E)
    ids_TK, weights_TK = routing()
    tokens_TD = torch.randn(T, D).requires_grad_()
    dispatched = dispatcher.dispatch(tokens_TD, weights_TK, dispatcher.plan(ids_TK, None))
    other = dispatched.source._replace(token_of_row_R=dispatched.source.token_of_row_R.flip(0))
    right, wrong = (
        torch.autograd.grad(experts(dispatched.rows_RD, dispatched.offsets_L, source).sum(), experts.up_proj)
        for source in (dispatched.source, other)
    )
    assert deviation(wrong[0], right[0]) > 0.1
