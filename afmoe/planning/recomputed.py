"""What is kept under `memory.activation_checkpointing`, and what backward computes again at a time.

none       everything
selective  the inputs of attention, feed-forward, experts and last norm; router and dispatch whole
full       the input of each layer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from afmoe.config import SLIDING_ATTENTION
from afmoe.planning.kept import attention_scores, router_input
from afmoe.planning.kept_experts import expert_casts
from afmoe.planning.setup import Setup


def kept_under_checkpointing(setup: Setup, layers: Sequence[Counter[str]]) -> Counter[str]:
    """What all layers keep. `layers`: what each would keep without."""
    kept: Counter[str] = Counter()
    if setup.activation_checkpointing == "none":
        return sum(layers, kept)
    tokens, size = setup.num_tokens, setup.model.hidden_size
    kept["layers' inputs"] = len(layers) * tokens * size * setup.hidden_bytes
    if setup.activation_checkpointing == "full":
        kept["masks and angles"] = tokens + held_beside(setup)
        return kept
    for index, layer in enumerate(layers):
        if index < setup.model.num_dense_layers:
            kept["dense"] += tokens * size * setup.hidden_bytes
        else:
            # all that a layer keeps of routing, but for the shared expert's share of the input
            kept["router"] += layer["router"] - router_input(setup) + router_input(setup, keeps_parts=False)
            kept["dispatch"] += layer["dispatch"] + setup.num_rows * size * setup.hidden_bytes
        kept["norms"] += tokens * size * setup.product_bytes
    kept["masks and angles"] = held_beside(setup)
    return kept


def held_beside(setup: Setup) -> int:
    """Masks of attention, a byte a score: what is computed again needs them. All layers share them."""
    if setup.attention not in ("sdpa", "reference"):
        return 0
    kinds = {kind == SLIDING_ATTENTION for kind in setup.model.layer_types or []}
    return sum(attention_scores(setup, is_sliding=kind) for kind in kinds)


def recomputed_at_once(setup: Setup, layers: Sequence[Counter[str]]) -> int:
    """What the part that keeps most adds while backward has computed it again; 0 where none is."""
    if setup.activation_checkpointing == "none":
        return 0
    casts = expert_casts(setup)
    if setup.activation_checkpointing == "full":
        return max((layer.total() for layer in layers), default=0) + casts
    return max(
        (
            max(
                layer["attention"] + layer["norms"],
                layer["dense"],
                layer["shared expert"],
                layer["experts"] + casts,
            )
            for layer in layers
        ),
        default=0,
    )
