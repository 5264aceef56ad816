"""What is kept under `memory.activation_checkpointing`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from afmoe.planning.setup import Setup


def kept_under_checkpointing(setup: Setup, layers: Sequence[Counter[str]]) -> Counter[str]:
    """What all layers keep. `layers`: what each would keep without."""
    kept: Counter[str] = Counter()
    if setup.activation_checkpointing == "none":
        for layer in layers:
            kept += layer
        return kept
    # a layer's input
    inputs = setup.num_tokens * setup.model.hidden_size * setup.hidden_bytes
    kept["layers' inputs"] = len(layers) * inputs
    return kept
