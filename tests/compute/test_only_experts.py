"""A compute plugin touches the routed experts and nothing else, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import CPU
from torch import Tensor, nn

from afmoe.config import AfmoeConfig
from afmoe.model import AfmoeForCausalLM
from afmoe.moe.experts import Experts

CONFIG = AfmoeConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_dense_layers=1,
    num_attention_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    num_shared_experts=1,
)


def parts(model: AfmoeForCausalLM) -> dict[str, nn.Module]:
    """Every module without children, the experts apart: norms, projections, gates, embedding, head."""
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, Experts) and not list(module.children())
    }


@pytest.mark.parametrize("compute", ["bf16", "fp8", "mxfp8"])
def test_all_but_the_routed_experts_computes_as_under_native(compute: str) -> None:
    chosen, native = (AfmoeForCausalLM(CONFIG, compute=name, hardware=CPU) for name in (compute, "native"))
    native.load_state_dict(chosen.state_dict())
    calls: dict[str, tuple[Any, Tensor]] = {}
    expert_calls: list[tuple[Any, Tensor]] = []

    def remember(name: str) -> Any:
        return lambda module, given, result: calls.update({name: (given, result)})

    for name, module in parts(chosen).items():
        module.register_forward_hook(remember(name))
    for module in chosen.modules():
        if isinstance(module, Experts):
            module.register_forward_hook(lambda module, given, result: expert_calls.append((given, result)))
    ids = torch.randint(64, (2, 24))
    chosen(ids)
    assert {"lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_expert.up_proj"} <= set(calls)
    for name, module in parts(native).items():
        if name in calls:
            given, result = calls[name]
            assert torch.equal(module(*given), result), name
    # and the experts do differ
    experts = [module for module in native.modules() if isinstance(module, Experts)]
    for module, (given, result) in zip(experts, expert_calls, strict=True):
        assert not torch.equal(module(*given), result)
