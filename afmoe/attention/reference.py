"""`attention=reference`: scores, mask and softmax written out, in any dtype. Judges the other plugins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.attention.layout import SequenceLayout
from afmoe.hardware import Hardware
from afmoe.registry import register


@register("attention", "reference")
class ReferenceAttention:
    """Time and memory grow with the square of the sequence, in sliding layers too."""

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, window: int, hardware: Hardware | None = None) -> None:
        self.window = window

    def prepare(self, layout: SequenceLayout) -> tuple[Tensor | None, Tensor | None]:
        """The masks of full and of sliding layers, [B or 1, queries, keys]."""
        return layout.visible(None), layout.visible(self.window)

    def __call__(
        self,
        query_BSHC: Tensor,
        key_BSGC: Tensor,
        value_BSGC: Tensor,
        prepared: tuple[Tensor | None, Tensor | None],
        *,
        is_sliding: bool,
        dropout: float,
    ) -> Tensor:
        num_groups = query_BSHC.shape[2] // key_BSGC.shape[2]
        query_BHSC = query_BSHC.transpose(1, 2)
        key_BHSC = key_BSGC.repeat_interleave(num_groups, 2).transpose(1, 2)
        value_BHSC = value_BSGC.repeat_interleave(num_groups, 2).transpose(1, 2)
        scores_BHSS = query_BHSC @ key_BHSC.transpose(2, 3) * query_BHSC.shape[3] ** -0.5
        mask = prepared[is_sliding]
        if mask is not None:
            # a cache of a sliding layer holds the last keys only
            mask = mask[:, None, :, mask.shape[2] - key_BSGC.shape[1] :]
            scores_BHSS = scores_BHSS.masked_fill(~mask, float("-inf"))
        weights_BHSS = scores_BHSS.softmax(-1, dtype=torch.promote_types(scores_BHSS.dtype, torch.float32))
        weights_BHSS = weights_BHSS.to(value_BHSC.dtype)
        if dropout:
            weights_BHSS = F.dropout(weights_BHSS, dropout)
        return (weights_BHSS @ value_BHSC).transpose(1, 2)
