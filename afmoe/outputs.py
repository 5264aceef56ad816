"""What the models return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afmoe.attention.layout import SequenceLayout


@dataclass
class ModelOutput:
    """What `AfmoeModel` returns."""

    last_hidden_state: Tensor
    """[B, S, D], after the last norm."""
    router_logits: tuple[Tensor, ...]
    layout: SequenceLayout


@dataclass
class CausalLMOutput:
    """What `AfmoeForCausalLM` returns."""

    loss: Tensor | None = None
    """Mean over the labels that count; 0 where none does."""
    logits: Tensor | None = None
    """[B, S, V]; None when labels were given and the logits not asked for."""
    router_logits: tuple[Tensor, ...] | None = None
    """One [B*S, E] a block, fp32, in the order of `iter_moe_blocks`."""
    aux_loss: Tensor | None = None
    """None unless a balance loss is on."""
    loss_sum: Tensor | None = None
    num_labels: Tensor | None = None
    """int64: labels that count."""
    predictions: Tensor | None = None
    """[B, S], int64: the likeliest next token of each position whose label counts, -100 at the others."""
