"""A model with every kind of parameter, made in milliseconds."""

from __future__ import annotations

from typing import Any

import torch

from afmoe import AfmoeConfig, AfmoeForCausalLM


def small_model(**changes: Any) -> AfmoeForCausalLM:
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "sliding_window": 8,
    }
    return AfmoeForCausalLM(AfmoeConfig(**fields | changes))


def draw_gradients(model: torch.nn.Module, seed: int = 0) -> None:
    """A gradient for every trainable parameter, in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
