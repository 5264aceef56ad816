"""What one of two expert ranks sends in a forward and backward, counted where torch.distributed is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# looks up the operator that is counted below, so it has to come first
import torch.distributed._functional_collectives
from torch import nn

from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.moe.dispatch import make_dispatcher
from afmoe.planning import Setup
from tests.planning.small_model import config, loss_of, made_for, num_bytes, setup_of

TRANSPORTS = ("native", "bf16", "mxfp8")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def two_expert_ranks() -> Setup:
    return setup_of(config(), num_ranks=2, ep_size=2, strategy="deepspeed", stage=1, dispatch="all_to_all")


def setups() -> list[Setup]:
    base = two_expert_ranks()
    first = [base.but(transport=transport) for transport in TRANSPORTS]
    others = [base.but(precision=precision) for precision in PRECISIONS[1:]]
    return [*first, *others, base.but(activation_checkpointing="full")]


def count_all() -> list[dict[str, int]]:
    """For each setup: bytes sent to the other rank and calls, of rows and of counts; bytes of the experts."""
    return [count(setup) for setup in setups()]


def count(setup: Setup) -> dict[str, int]:
    model = share_experts(made_for(setup), setup)
    counted = {"row_bytes": 0, "row_calls": 0, "count_bytes": 0, "count_calls": 0}
    exchange_rows, namespace = dist.all_to_all_single, torch.ops._c10d_functional
    exchange_counts = namespace.all_to_all_single
    other = 1 - dist.get_rank()

    def rows(output: Any, values: Any, received: Any, sent: Any, **options: Any) -> Any:
        counted["row_bytes"] += num_bytes(values.split(sent)[other])
        counted["row_calls"] += 1
        return exchange_rows(output, values, received, sent, **options)

    def counts(values: Any, received: Any, sent: Any, name: str) -> Any:
        counted["count_bytes"] += num_bytes(values.split(sent)[other])
        counted["count_calls"] += 1
        return exchange_counts(values, received, sent, name)

    dist.all_to_all_single, namespace.all_to_all_single = rows, counts
    try:
        loss_of(model, setup).backward()
    finally:
        dist.all_to_all_single, namespace.all_to_all_single = exchange_rows, exchange_counts
    experts = [parameter for block in iter_moe_blocks(model) for parameter in block.experts.parameters()]
    return counted | {"expert_bytes": num_bytes(*experts)}


def share_experts(model: AfmoeForCausalLM, setup: Setup) -> AfmoeForCausalLM:
    """Leave this rank its experts, and send tokens to experts in turn: even loads."""
    for block in iter_moe_blocks(model):
        for name, parameter in list(block.experts.named_parameters()):
            local = parameter.detach().chunk(setup.ep_size)[dist.get_rank()].clone()
            setattr(block.experts, name, nn.Parameter(local))
        block.dispatcher = make_dispatcher(
            {"name": "all_to_all", "transport": setup.transport},
            num_experts=setup.model.num_experts,
            process_group=dist.group.WORLD,
        )
        block.router.balanced = True
    return model
