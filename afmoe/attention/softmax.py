"""Attention written out, without a fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    query_BSHC: Tensor, key_BSGC: Tensor, value_BSGC: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    """The mixed values [B, S, H, C]: softmax in fp32 at least, every product in the operands' dtype.

    `mask` [B or 1, queries, keys], True where a query sees a key; None: all see all.
    """
    num_groups = query_BSHC.shape[2] // key_BSGC.shape[2]
    query_BHSC = query_BSHC.transpose(1, 2)
    key_BHSC = key_BSGC.repeat_interleave(num_groups, 2).transpose(1, 2)
    value_BHSC = value_BSGC.repeat_interleave(num_groups, 2).transpose(1, 2)
    scores_BHSS = query_BHSC @ key_BHSC.transpose(2, 3) * query_BHSC.shape[3] ** -0.5
    if mask is not None:
        scores_BHSS = scores_BHSS.masked_fill(~mask[:, None], float("-inf"))
    weights_BHSS = scores_BHSS.softmax(-1, dtype=torch.promote_types(scores_BHSS.dtype, torch.float32))
    weights_BHSS = weights_BHSS.to(value_BHSC.dtype)
    if dropout:
        weights_BHSS = F.dropout(weights_BHSS, dropout)
    return (weights_BHSS @ value_BHSC).transpose(1, 2)
