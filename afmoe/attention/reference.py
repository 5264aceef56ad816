"""`attention=reference`: scores, mask and softmax written out, in any dtype. Judges the other plugins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afmoe.attention import AttentionPlugin
from afmoe.attention.layout import SequenceLayout
from afmoe.attention.softmax import attend
from afmoe.registry import register


@register("attention", "reference")
class ReferenceAttention(AttentionPlugin):
    """Time and memory grow with the square of the sequence, in sliding layers too."""

    @dataclass(kw_only=True)
    class Config:
        pass

    def prepare(self, layout: SequenceLayout) -> tuple[Tensor | None, Tensor | None]:
        """The masks of full and of sliding layers, [B or 1, queries, keys]."""
        return layout.visible(None), layout.visible_in_cache(self.window)

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
        return attend(query_BSHC, key_BSGC, value_BSGC, prepared[is_sliding], dropout)
