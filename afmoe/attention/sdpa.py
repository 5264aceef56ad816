"""`attention=sdpa`: torch's scaled_dot_product_attention, and blocks of it for sliding layers.

A sliding layer over a long sequence is cut into blocks at least as wide as the window, so that a query's keys
lie in its own block and the one before: time and memory grow linearly with the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.attention.layout import SequenceLayout
from afmoe.attention.softmax import attend
from afmoe.hardware import Hardware
from afmoe.registry import register

# narrower blocks than this cost more in small matrix products than they save
_MIN_BLOCK = 64
# fused kernels take the gradient of the softmax from its output, which leaves rounding noise of 3e-8 of the
# whole gradient where it should be zero (one key) or is tiny (two keys); so few cost nothing written out
_FEW_KEYS = 4


@dataclass(frozen=True, kw_only=True)
class _Masks:
    """What all layers of one forward share. A mask of None: every query sees every key, or is causal."""

    full: Tensor | None
    sliding: Tensor | None
    """[B or 1, queries, keys], or with blocks [B * blocks, block, 2 * block]."""
    is_full_causal: bool
    is_sliding_causal: bool
    num_blocks: int
    """Blocks that a sliding layer is cut into; 0: not cut."""


@register("attention", "sdpa")
class SdpaAttention:
    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, window: int, hardware: Hardware | None = None) -> None:
        self.window = window
        self.block_size = max(window, _MIN_BLOCK)

    def prepare(self, layout: SequenceLayout) -> _Masks:
        # one unpadded document a row: torch's own causal path, which reads no mask and skips what lies above
        # the diagonal
        is_causal = layout.document_ids_BS is None and layout.num_cached == 0 and layout.num_keys > _FEW_KEYS
        fits = layout.num_keys <= self.window
        has_blocks = layout.num_cached == 0 and layout.num_queries > 2 * self.block_size
        full = None if is_causal else layout.visible(None)
        if has_blocks:
            sliding = self._block_masks(layout)
        elif fits:
            sliding = full
        else:
            first_key = max(0, layout.num_cached - self.window + 1)
            sliding = layout.visible(self.window, first_key)
        return _Masks(
            full=full,
            sliding=sliding,
            is_full_causal=is_causal,
            is_sliding_causal=is_causal and fits,
            num_blocks=-(-layout.num_queries // self.block_size) if has_blocks else 0,
        )

    def __call__(
        self,
        query_BSHC: Tensor,
        key_BSGC: Tensor,
        value_BSGC: Tensor,
        prepared: _Masks,
        *,
        is_sliding: bool,
        dropout: float,
    ) -> Tensor:
        if not is_sliding:
            return _attend(query_BSHC, key_BSGC, value_BSGC, prepared.full, prepared.is_full_causal, dropout)
        if not prepared.num_blocks:
            return _attend(
                query_BSHC, key_BSGC, value_BSGC, prepared.sliding, prepared.is_sliding_causal, dropout
            )
        batch_size, length, num_heads, head_dim = query_BSHC.shape
        mixed = _attend(
            self._blocks(query_BSHC, prepared.num_blocks).flatten(0, 1),
            self._blocks_with_previous(key_BSGC, prepared.num_blocks),
            self._blocks_with_previous(value_BSGC, prepared.num_blocks),
            prepared.sliding,
            False,
            dropout,
        )
        return mixed.reshape(batch_size, -1, num_heads, head_dim)[:, :length]

    def _blocks(self, x_BSHC: Tensor, num_blocks: int) -> Tensor:
        """[B, blocks, block, H, C], zeros behind the last token."""
        missing = num_blocks * self.block_size - x_BSHC.shape[1]
        return F.pad(x_BSHC, (0, 0, 0, 0, 0, missing)).unflatten(1, (num_blocks, self.block_size))

    def _blocks_with_previous(self, x_BSGC: Tensor, num_blocks: int) -> Tensor:
        """[B * blocks, 2 * block, G, C]: each block behind the one before it, zeros before the first."""
        blocks = self._blocks(x_BSGC, num_blocks)
        previous = F.pad(blocks[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat((previous, blocks), dim=2).flatten(0, 1)

    def _block_masks(self, layout: SequenceLayout) -> Tensor:
        """[B * blocks, block, 2 * block]: what a block's queries see of it and the block before it."""
        size = self.block_size
        num_blocks = -(-layout.num_queries // size)
        queries_S1 = torch.arange(size, 2 * size, device=layout.device)[:, None]
        keys_S = torch.arange(2 * size, device=layout.device)
        band = (keys_S <= queries_S1) & (keys_S > queries_S1 - self.window)
        if layout.document_ids_BS is None:
            has_previous = torch.arange(num_blocks, device=layout.device)[:, None, None] > 0
            mask = band & (has_previous | (keys_S >= size))
            return mask.repeat(layout.batch_size, 1, 1)
        # an id that no token has, for what lies before the first and behind the last token; a query behind
        # the last token still sees itself, so that its softmax is not empty
        documents = F.pad(layout.document_ids_BS, (size, num_blocks * size - layout.num_queries), value=-2)
        pairs = documents.unfold(1, 2 * size, size)
        return (band & (pairs[:, :, size:, None] == pairs[:, :, None, :])).flatten(0, 1)


def _attend(
    query_BSHC: Tensor,
    key_BSGC: Tensor,
    value_BSGC: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    if key_BSGC.shape[1] <= _FEW_KEYS:
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
