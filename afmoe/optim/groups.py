"""Which parameters decay: matrices do; norms, biases, embeddings, head and router do not."""

from __future__ import annotations

from typing import Any

from torch import nn

_NO_DECAY = ("embed_tokens.", "lm_head.", "router.")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters as optimizer groups `decay` and `no_decay`, in the model's order; empty ones left
    out.

    Each group carries `name` and `parameter_names`, for the log. Embedding and head do not decay because most
    of their rows get no gradient in a step, and the router does not because decay alone would flatten its
    choice.
    """
    groups: dict[str, dict[str, Any]] = {
        "decay": {"name": "decay", "weight_decay": weight_decay, "params": [], "parameter_names": []},
        "no_decay": {"name": "no_decay", "weight_decay": 0.0, "params": [], "parameter_names": []},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = (
            parameter.ndim >= 2 and not any(part in name for part in _NO_DECAY) and not name.endswith("_bias")
        )
        group = groups["decay" if decays else "no_decay"]
        group["params"].append(parameter)
        group["parameter_names"].append(name)
    return [group for group in groups.values() if group["params"]]
