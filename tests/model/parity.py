"""Our model and transformers', with the same weights, and the measure that compares them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AfmoeConfig as TransformersConfig
from transformers import AfmoeForCausalLM as TransformersModel

from afmoe import AfmoeConfig, AfmoeForCausalLM

TOLERANCE = 1e-5
"""fp32, the contract's; what was measured stands beside each use."""

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "sliding_window": 16,
    "mup_enabled": True,
    "route_scale": 2.8,
    "max_position_embeddings": 512,
}
"""Every default trait: dense prefix, sliding and full layers, grouped heads, shared expert, muP."""

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 48,
    "short_factor": [1.0 + 0.1 * step for step in range(8)],
    "long_factor": [1.0 + 0.5 * step for step in range(8)],
}


def our_model(
    *, seed: int = 0, attention: str = "sdpa", compute: str = "native", **fields: Any
) -> AfmoeForCausalLM:
    """A small model of ours, norms, biases and selection bias not at their trivial initial values."""
    model = AfmoeForCausalLM(AfmoeConfig(**SMALL | fields), attention=attention, compute=compute)
    randomize(model, seed)
    return model.eval()


def their_model(seed: int = 0, **fields: Any) -> TransformersModel:
    """transformers' model, eager attention, weights as in `our_model`."""
    config = TransformersConfig(**SMALL | fields, attn_implementation="eager")
    model = TransformersModel(config)
    randomize(model, seed)
    return model.eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "rotary" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
        else:
            tensor.copy_(noise * (0.05 if tensor.dim() > 1 else 0.1))


def canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under transformers' names in memory, under ours."""
    result = {}
    for name, tensor in tensors.items():
        name = name.replace("mlp.expert_bias", "mlp.router.selection_bias")
        name = name.replace("shared_experts", "shared_expert")
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            result[name.replace("gate_up_proj", "gate_proj")] = gate
            result[name.replace("gate_up_proj", "up_proj")] = up
        elif tensor.numel():
            result[name] = tensor
    return result


def pair(
    *, attention: str = "sdpa", compute: str = "native", seed: int = 0, **fields: Any
) -> tuple[AfmoeForCausalLM, TransformersModel]:
    """Both models with the same weights, in eval mode."""
    theirs = their_model(seed, **fields)
    ours = our_model(attention=attention, compute=compute, **fields)
    ours.load_state_dict(canonical(theirs.state_dict()))
    return ours, theirs


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, zeros where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def deviation(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """||a - b|| / max(||b||, floor); 0 for two zeros."""
    difference = (ours.double() - theirs.double()).norm().item()
    return 0.0 if difference == 0 else difference / max(theirs.double().norm().item(), floor)


def gradient_deviation(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest deviation of any tensor; the floor is 1e-6 of the whole gradient's norm."""
    assert ours.keys() == theirs.keys()
    whole = torch.stack([gradient.double().norm() for gradient in theirs.values()]).norm().item()
    return max(deviation(ours[name], theirs[name], 1e-6 * whole) for name in theirs)


def compare(
    ours: AfmoeForCausalLM, theirs: TransformersModel, ids: Tensor, **inputs: Any
) -> dict[str, float]:
    """Deviations of logits, loss and gradients on `ids`.

    The objective is a fixed random projection of the logits plus the loss, so that a single token, which has
    no label, is compared too.
    """
    projection = torch.randn(*ids.shape, ours.config.vocab_size, generator=torch.Generator().manual_seed(1))
    result = {}
    their_output = theirs(ids, **inputs, labels=ids)
    our_output = ours(ids, **inputs, labels=ids, return_logits=True)
    for model, output in ((ours, our_output), (theirs, their_output)):
        model.zero_grad()
        objective = (output.logits * projection).mean()
        if ids.shape[1] > 1:
            objective = objective + output.loss
        objective.backward()
    result["logits"] = deviation(our_output.logits, their_output.logits)
    if ids.shape[1] > 1:
        result["loss"] = deviation(our_output.loss, their_output.loss)
    our_gradients, their_gradients = gradients(ours), canonical(gradients(theirs))
    if ours.config.num_experts_per_tok == 1:
        # a single chosen score divided by itself: the gate's gradient is zero but for rounding, in both
        for name in [name for name in their_gradients if name.endswith("router.gate.weight")]:
            largest = max(our_gradients.pop(name).norm(), their_gradients.pop(name).norm()).item()
            assert largest <= 1e-8 * sum(gradient.norm() for gradient in their_gradients.values()), name
    result["gradients"] = gradient_deviation(our_gradients, their_gradients)
    return result


def random_ids(*shape: int, seed: int = 0, vocab_size: int = SMALL["vocab_size"]) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
