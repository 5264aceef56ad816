"""How many floating point operations a model of this family takes, exactly, from its config.

A product of [a, b] and [b, c] takes 2abc operations; its backward two such products. Products alone count:
projections of attention (its gate included), scores and mixing of values for the keys that a query may see,
the dense feed-forward part or router, chosen experts and shared expert, the head where a label is learned.
Norms, softmax, rotary embedding and activations do not count, nor does what is computed and thrown away:
padding, masked keys, the second forward of activation checkpointing.

Where other counts go wrong for AFMoE: heads times `head_dim` need not be the hidden size, attention has a
gate projection, the first `num_dense_layers` have no experts, sliding layers see `sliding_window` keys at
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afmoe.config import SLIDING_ATTENTION, AfmoeConfig


@dataclass(frozen=True)
class ModelFlops:
    """Operations of one forward, by what they grow with."""

    per_token: int
    """All products with weights, but for the head."""
    per_label: int
    """The head, which only tokens with a label need."""
    per_full_pair: int
    """Scores and mixing, for each query and key that it sees; all full layers together."""
    per_sliding_pair: int
    """The same for all sliding layers."""
    window: int

    @classmethod
    def of(cls, config: AfmoeConfig) -> ModelFlops:
        hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_heads = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
        # query, gate and output; key and value
        attention = hidden * (3 * heads + 2 * kv_heads)
        dense = 3 * hidden * config.intermediate_size
        experts = config.num_experts_per_tok + config.num_shared_experts
        sparse = hidden * config.num_experts + experts * 3 * hidden * config.moe_intermediate_size
        num_dense = min(config.num_dense_layers, config.num_hidden_layers)
        num_sparse = config.num_hidden_layers - num_dense
        num_sliding = (config.layer_types or []).count(SLIDING_ATTENTION)
        return cls(
            per_token=2 * (config.num_hidden_layers * attention + num_dense * dense + num_sparse * sparse),
            per_label=2 * hidden * config.vocab_size,
            per_full_pair=4 * heads * (config.num_hidden_layers - num_sliding),
            per_sliding_pair=4 * heads * num_sliding,
            window=config.sliding_window,
        )

    def forward(self, lengths: Sequence[int] | np.ndarray, num_labels: int | None = None) -> int:
        """Operations for documents of these lengths, packed in any way. `num_labels` None: every token."""
        num_tokens = int(np.sum(lengths, dtype=np.int64))
        return (
            self.per_token * num_tokens
            + self.per_label * (num_tokens if num_labels is None else num_labels)
            + self.per_full_pair * visible_pairs(lengths)
            + self.per_sliding_pair * visible_pairs(lengths, self.window)
        )

    def training(self, lengths: Sequence[int] | np.ndarray, num_labels: int | None = None) -> int:
        """Forward and backward: gradients of both factors of every product. Frozen weights count too."""
        return 3 * self.forward(lengths, num_labels)


def visible_pairs(lengths: Sequence[int] | np.ndarray, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees: itself and what stands before it in its document.

    `window`: at most so many keys a query. Over the number of tokens it is the mean number of visible keys.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    # the first queries of a document see all before them, later ones a whole window
    growing = lengths if window is None else np.minimum(lengths, window)
    pairs = growing * (growing + 1) // 2
    if window is not None:
        pairs = pairs + (lengths - growing) * window
    return int(pairs.sum())
