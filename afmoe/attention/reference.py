"""`attention=reference`: scores, mask and softmax written out, in any dtype. Judges the other plugins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afmoe.attention.layout import SequenceLayout
from afmoe.attention.softmax import attend
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
        mask = prepared[is_sliding]
        if mask is not None:
            # a cache of a sliding layer holds the last keys only
            mask = mask[:, :, mask.shape[2] - key_BSGC.shape[1] :]
        return attend(query_BSHC, key_BSGC, value_BSGC, mask, dropout)
