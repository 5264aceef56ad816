"""Losses: the cross entropy of the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.attention.layout import PADDING, SequenceLayout
from afmoe.errors import ConfigError

IGNORED = -100
"""Label of a token that is not to be learned."""


def next_token_targets(labels_BS: Tensor, layout: SequenceLayout) -> Tensor:
    """What each position has to predict: the label one to the right, `IGNORED` where nothing counts.

    A label counts when it and the token before it are real tokens of one document, so the first token of a
    document is never a target. Raises `ConfigError` for labels of another shape than the tokens.
    """
    shape = (layout.batch_size, layout.num_queries)
    if labels_BS.shape != shape:
        raise ConfigError(f"labels must be [batch, sequence] = {list(shape)}, got {list(labels_BS.shape)}")
    targets_BS = F.pad(labels_BS.to(layout.device)[:, 1:], (0, 1), value=IGNORED)
    documents_BS = layout.document_ids_BS
    if documents_BS is None:
        return targets_BS
    next_documents_BS = F.pad(documents_BS[:, 1:], (0, 1), value=PADDING)
    is_inside = (documents_BS == next_documents_BS) & (documents_BS != PADDING)
    return targets_BS.masked_fill(~is_inside, IGNORED)


def token_cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Summed cross entropy over the targets that count, in fp32 at least."""
    logits_TV = logits_BSV.flatten(0, 1)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")
