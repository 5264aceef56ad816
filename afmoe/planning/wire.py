"""What one rank sends in one optimizer step, and in how many collectives.

Sums of n ranks count as rings: an all-reduce sends 2 (n - 1) / n of the bytes, a reduce-scatter or an
all-gather (n - 1) / n. Rows for a rank's own experts stay off the wire: with even routing 1 / S of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from afmoe.planning.memory import wire_row_bytes
from afmoe.planning.parameters import Parameter, parameters
from afmoe.planning.setup import FP32, INDEX, Setup
from afmoe.planning.states import num_replicas, shares

DDP_BUCKET = 25 << 20
"""Bytes of gradients that DDP reduces at once."""


@dataclass(frozen=True)
class Traffic:
    """One kind of communication, of one rank and optimizer step."""

    name: str
    num_bytes: int
    """Sent to other ranks."""
    num_collectives: int


def traffic(setup: Setup) -> list[Traffic]:
    """Everything between ranks, routing even."""
    trained = [one for one in parameters(setup) if one.is_trained]
    kinds = [*_dispatch(setup), *_gradients(setup, trained), *_weights(setup, trained)]
    return [kind for kind in kinds if kind.num_collectives]


def _dispatch(setup: Setup) -> list[Traffic]:
    if setup.dispatch == "local":
        return []
    away = (setup.ep_size - 1) / setup.ep_size
    num_layers = setup.num_moe_layers * setup.accumulate
    copies = setup.num_copies * away
    if setup.dispatch == "deepep":
        copies = setup.num_tokens * ranks_reached(setup)
    # tokens leave with the dtype of the layers, answers with that of the products; gradients likewise
    out = copies * wire_row_bytes(setup, setup.hidden_bytes if setup.dispatch != "deepep" else 2)
    back = copies * wire_row_bytes(setup, setup.product_bytes if setup.dispatch != "deepep" else 2)
    again = 1 if setup.activation_checkpointing == "full" else 0
    counts = setup.model.num_experts * away * INDEX
    return [
        Traffic("tokens to experts and back", round(num_layers * (out + back)), 2 * num_layers),
        Traffic("their gradients", round(num_layers * (out + back)), 2 * num_layers),
        Traffic("computed again", round(num_layers * again * (out + back + counts)), 3 * num_layers * again),
        Traffic("counts", round(num_layers * counts), num_layers),
    ]


def ranks_reached(setup: Setup) -> float:
    """Other ranks that one token's K experts live on, on average: DeepEP sends it once to each."""
    config = setup.model
    elsewhere = config.num_experts - setup.num_local_experts
    missed = math.comb(elsewhere, config.num_experts_per_tok) / math.comb(
        config.num_experts, config.num_experts_per_tok
    )
    return (setup.ep_size - 1) * (1 - missed)


def _gradients(setup: Setup, trained: list[Parameter]) -> list[Traffic]:
    result = []
    each_micro_batch = setup.zero_stage in (2, 3)
    times = setup.accumulate if each_micro_batch else 1
    for name, is_expert in (("dense gradients", False), ("expert gradients", True)):
        ours = [one for one in trained if one.is_expert is is_expert]
        if not ours or (num_ranks := num_replicas(setup, ours[0])) == 1:
            continue
        if setup.strategy == "ddp":
            size = sum(one.num_bytes for one in ours)
            count = math.ceil(size / DDP_BUCKET)
        else:
            size = FP32 * sum(one.numel for one in ours)
            count = math.ceil(size / FP32 / setup.bucket_size)
        # ZeRO 1 and 2 reduce a bucket to all ranks at once, each then keeps its share
        factor = (1 if setup.zero_stage == 3 else 2) * (num_ranks - 1) / num_ranks
        result.append(Traffic(name, round(times * factor * size), times * count))
    return result


def _weights(setup: Setup, trained: list[Parameter]) -> list[Traffic]:
    if setup.zero_stage in (1, 2):
        # each group's new weights, once a step
        size = count = muon_size = muon_count = 0
        for (is_expert, is_matrix, each), share in shares(setup, trained).items():
            num_ranks = setup.num_expert_replicas if is_expert else setup.num_ranks
            size += share * each * (num_ranks - 1)
            count += num_ranks > 1
            if setup.optimizer == "muon" and is_matrix:
                # weights, gradients and momenta, for a step on whole matrices
                muon_size += 3 * FP32 * share * (num_ranks - 1)
                muon_count += 3 * (num_ranks > 1)
        return [
            Traffic("matrices put together", muon_size, muon_count),
            Traffic("weights gathered", size, count),
        ]
    if setup.zero_stage == 3:
        # for forward, and again for backward
        times = 2 * setup.accumulate
        away = (setup.num_ranks - 1) / setup.num_ranks
        held = parameters(setup)
        size = times * away * sum(one.num_bytes for one in held)
        return [Traffic("weights gathered", round(size), times * len(held) if setup.num_ranks > 1 else 0)]
    return []
