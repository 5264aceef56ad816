"""Activation checkpointing: a part of the model keeps its inputs, and backward computes the rest again.

- `full`: a decoder layer is one such part, so its input is all that is kept.
- `selective`: attention, the dense or shared feed-forward, the routed experts and the last norm are parts of
  their own. What lies between them is kept: the router's logits, scores and chosen experts, the rows that
  dispatch brought and those that combine summed. So neither routing nor communication is repeated.

The same operations on the same values in the same order: gradients are bitwise those without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def part(function: Callable[..., Any], *inputs: Any, is_recomputed: bool, **options: Any) -> Any:
    """`function(*inputs)`. `is_recomputed`: what it keeps for backward is dropped and computed again there.

    Without gradients nothing is kept in any case. Random numbers are the same again. `options` are those of
    `torch.utils.checkpoint.checkpoint`.
    """
    if not (is_recomputed and torch.is_grad_enabled()):
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, **options)
