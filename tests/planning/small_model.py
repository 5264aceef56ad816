"""A small model with every trait, trained for one step, and the bytes of what that leaves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from afmoe.config import AfmoeConfig
from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.planning import Setup

BATCH_SIZE = 2


def config(**changes: Any) -> AfmoeConfig:
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "sliding_window": 16,
        "global_attn_every_n_layers": 3,
        "route_scale": 1.5,
        "mup_enabled": True,
    }
    return AfmoeConfig(**values | changes)


def setup_of(model: AfmoeConfig, sequence_length: int = 96, **changes: Any) -> Setup:
    return Setup(
        model=model,
        batch_size=BATCH_SIZE,
        sequence_length=sequence_length,
        device_type="cpu",
        emulates=True,
    ).but(**changes)


def made_for(setup: Setup) -> AfmoeForCausalLM:
    """The model of a setup, stored as its precision says."""
    model = AfmoeForCausalLM(setup.model, attention=setup.attention, compute=setup.compute)
    for block in iter_moe_blocks(model):
        block.router.fp32 = setup.fp32_router
    recompute(model, setup.activation_checkpointing)
    return model.bfloat16() if setup.precision == "bf16-true" else model


def recompute(model: AfmoeForCausalLM, level: str) -> None:
    model.model.recomputes_layers = level == "full"
    for layer in model.model.layers:
        layer.recomputes_parts = level == "selective"
    for block in iter_moe_blocks(model):
        block.recomputes_experts = level == "selective"


def loss_of(model: nn.Module, setup: Setup) -> Tensor:
    """The loss of one batch of packed rows, as the recipe asks for it."""
    shape = (setup.batch_size, setup.sequence_length)
    ids = torch.randint(0, setup.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    half = setup.sequence_length // 2
    positions = torch.cat([torch.arange(half), torch.arange(setup.sequence_length - half)]).expand(shape)
    autocast = setup.precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        return model(ids, positions, ids, attention_mask=torch.ones_like(ids)).loss


def num_bytes(*tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
