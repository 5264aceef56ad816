"""`attention=sdpa`: torch's scaled_dot_product_attention, and blocks of it for sliding layers.

A sliding layer over a long sequence is cut into blocks at least as wide as the window, so that a query's keys
lie in its own block and the one before: time and memory grow linearly with the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.attention import AttentionPlugin
from afmoe.attention.layout import SequenceLayout
from afmoe.attention.softmax import attend
from afmoe.registry import register

# narrower blocks than this cost more in small matrix products than they save
_MIN_BLOCK = 64
# fused kernels take the gradient of the softmax from its output, which leaves rounding noise of 3e-8 of the
# whole gradient where it should be zero (one key) or is tiny (two keys); so few cost nothing written out
_FEW_KEYS = 4


@register("attention", "sdpa")
class SdpaAttention(AttentionPlugin):
    @dataclass(kw_only=True)
    class Config:
        pass

    def prepare(self, layout: SequenceLayout) -> Masks:
        return Masks(layout, self.window, self.layer_kinds)

    def __call__(
        self,
        query_BSHC: Tensor,
        key_BSGC: Tensor,
        value_BSGC: Tensor,
        prepared: Masks,
        *,
        is_sliding: bool,
        dropout: float,
    ) -> Tensor:
        if not is_sliding:
            return _attend(query_BSHC, key_BSGC, value_BSGC, prepared.full, prepared.is_causal, dropout)
        if not prepared.has_blocks:
            is_causal = prepared.is_causal and prepared.fits_window
            return _attend(
                query_BSHC, key_BSGC, value_BSGC, prepared.sliding, is_causal, dropout, self.window
            )
        batch_size, length = query_BSHC.shape[:2]
        mixed = _attend(
            prepared.blocks(query_BSHC).flatten(0, 1),
            prepared.blocks_with_previous(key_BSGC),
            prepared.blocks_with_previous(value_BSGC),
            prepared.sliding,
            False,
            dropout,
            self.window,
        )
        return mixed.unflatten(0, (batch_size, -1)).flatten(1, 2)[:, :length]


class Masks:
    """The masks that all layers of one forward share, built for the kinds of layers that the model has.

    A mask of None stands for torch's own causal path where `is_causal`, else every query sees every key.
    """

    full: Tensor | None = None
    """[B or 1, queries, keys]."""
    sliding: Tensor | None = None
    """[B or 1, queries, keys], with blocks [B * blocks, block, 2 * block]."""

    def __init__(self, layout: SequenceLayout, window: int, layer_kinds: frozenset[bool]) -> None:
        self.layout = layout
        self.window = window
        self.block_size = max(window, _MIN_BLOCK)
        # one unpadded document a row: torch reads no mask then and skips what lies above the diagonal
        is_plain = layout.document_ids_BS is None and layout.num_cached == 0
        self.is_causal = is_plain and layout.num_keys > _FEW_KEYS
        self.fits_window = layout.num_keys <= window
        # up to two blocks a mask of all tokens is no larger than that of the blocks
        self.has_blocks = layout.num_cached == 0 and layout.num_queries > 2 * self.block_size
        self.num_blocks = -(-layout.num_queries // self.block_size)
        if not self.is_causal and (False in layer_kinds or self.fits_window):
            self.full = layout.visible(None)
        if self.fits_window:
            self.sliding = self.full
        elif True in layer_kinds:
            self.sliding = self._block_masks() if self.has_blocks else layout.visible_in_cache(self.window)

    def blocks(self, x_BSHC: Tensor) -> Tensor:
        """[B, blocks, block, H, C], zeros behind the last token."""
        missing = self.num_blocks * self.block_size - x_BSHC.shape[1]
        return F.pad(x_BSHC, (0, 0, 0, 0, 0, missing)).unflatten(1, (self.num_blocks, self.block_size))

    def blocks_with_previous(self, x_BSGC: Tensor) -> Tensor:
        """[B * blocks, 2 * block, G, C]: each block behind the one before it, zeros before the first."""
        blocks = self.blocks(x_BSGC)
        previous = F.pad(blocks[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat((previous, blocks), dim=2).flatten(0, 1)

    def _block_masks(self) -> Tensor:
        """What a block's queries see of it and of the block before it."""
        layout, size = self.layout, self.block_size
        queries_S1 = torch.arange(size, 2 * size, device=layout.device)[:, None]
        keys_S = torch.arange(2 * size, device=layout.device)
        band = (keys_S <= queries_S1) & (keys_S > queries_S1 - self.window)
        if layout.document_ids_BS is None:
            has_previous = torch.arange(self.num_blocks, device=layout.device)[:, None, None] > 0
            mask = band & (has_previous | (keys_S >= size))
            return mask.repeat(layout.batch_size, 1, 1)
        # an id that no token has, for what lies before the first and behind the last token; a query behind
        # the last token still sees itself, so that its softmax is not empty
        behind = self.num_blocks * size - layout.num_queries
        pairs = F.pad(layout.document_ids_BS, (size, behind), value=-2).unfold(1, 2 * size, size)
        return (band & (pairs[:, :, size:, None] == pairs[:, :, None, :])).flatten(0, 1)


def _attend(
    query_BSHC: Tensor,
    key_BSGC: Tensor,
    value_BSGC: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    window: int | None = None,
) -> Tensor:
    most_seen = key_BSGC.shape[1] if window is None else min(window, key_BSGC.shape[1])
    if most_seen <= _FEW_KEYS:
        return attend(query_BSHC, key_BSGC, value_BSGC, mask, dropout)
    mixed_BHSC = F.scaled_dot_product_attention(
        query_BSHC.transpose(1, 2),
        key_BSGC.transpose(1, 2),
        value_BSGC.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        dropout_p=dropout,
        is_causal=is_causal,
        enable_gqa=query_BSHC.shape[2] != key_BSGC.shape[2],
    )
    return mixed_BHSC.transpose(1, 2)
