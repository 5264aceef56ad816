"""Which tokens of a batch see which: documents, padding, positions, worked out once per forward.

A token sees the real tokens of its own document up to itself; in a sliding layer the last `window` of them.
The same rule holds in every attention plugin, which turns a `SequenceLayout` into the form its kernel wants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.errors import ConfigError

PADDING = -1
"""Document id of padding tokens: no real token has it, so none sees them."""


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The rows of one forward. The keys are the cached tokens followed by the `num_queries` new ones."""

    num_queries: int
    num_keys: int
    position_ids_BS: Tensor
    """Positions of the queries, int64."""
    document_ids_BS: Tensor | None
    """Documents of the keys [B, num_keys], `PADDING` for padding; None: one document a row and no padding."""
    token_mask_BS: Tensor | None
    """True for the queries that are real; None: all are."""
    device: torch.device

    @property
    def batch_size(self) -> int:
        return self.position_ids_BS.shape[0]

    @property
    def num_cached(self) -> int:
        return self.num_keys - self.num_queries

    def first_key(self, window: int | None) -> int:
        """The first key that a cache hands to a layer with this window: earlier ones no new token sees."""
        return 0 if window is None else max(0, self.num_cached - window + 1)

    def visible_in_cache(self, window: int | None) -> Tensor | None:
        """`visible` for the keys that a cache hands to a layer with this window."""
        return self.visible(window, self.first_key(window))

    def visible(self, window: int | None, first_key: int = 0) -> Tensor | None:
        """Boolean mask [B or 1, queries, keys from `first_key` on], True where a query sees a key.

        `window` None: no limit. None comes back when every query sees every key. A padding token sees the
        padding before it and itself, so that no row of a softmax is empty.
        """
        is_within = window is None or self.num_keys - first_key <= window
        if self.num_queries == 1 and self.document_ids_BS is None and is_within:
            return None
        queries_S1 = torch.arange(self.num_cached, self.num_keys, device=self.device)[:, None]
        keys_S = torch.arange(first_key, self.num_keys, device=self.device)
        mask = keys_S <= queries_S1
        if window is not None:
            mask = mask & (keys_S > queries_S1 - window)
        if self.document_ids_BS is None:
            return mask[None]
        query_documents_BS1 = self.document_ids_BS[:, self.num_cached :, None]
        return mask & (query_documents_BS1 == self.document_ids_BS[:, None, first_key:])


def sequence_layout(
    shape: tuple[int, int],
    device: torch.device,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> SequenceLayout:
    """The layout of a whole batch [B, S] without cached tokens.

    `position_ids` [B, S] or [1, S]: a 0 begins a new document. None: one document a row, which begins at its
    first real token. `attention_mask` [B, S]: 1 is real, None: all are. Raises `ConfigError` for other
    shapes.
    """
    batch_size, length = shape
    token_mask_BS = None
    if attention_mask is not None:
        if attention_mask.shape != shape:
            raise ConfigError(
                f"attention_mask must be [batch, sequence] = {list(shape)} with 1 for real tokens, "
                f"got {list(attention_mask.shape)}"
            )
        token_mask_BS = attention_mask.to(device=device, dtype=torch.bool)
    document_ids_BS = None
    if position_ids is not None:
        if (
            position_ids.dim() != 2
            or position_ids.shape[0] not in (1, batch_size)
            or position_ids.shape[1] != length
        ):
            raise ConfigError(
                f"position_ids must be [batch, sequence] = {list(shape)}, got {list(position_ids.shape)}"
            )
        position_ids_BS = position_ids.to(device).expand(batch_size, length)
        document_ids_BS = (position_ids_BS == 0).cumsum(1)
    elif token_mask_BS is not None:
        position_ids_BS = (token_mask_BS.cumsum(1) - 1).clamp(min=0)
        document_ids_BS = torch.zeros_like(position_ids_BS)
    else:
        position_ids_BS = torch.arange(length, device=device).expand(batch_size, length)
    if token_mask_BS is not None and document_ids_BS is not None:
        document_ids_BS = document_ids_BS.masked_fill(~token_mask_BS, PADDING)
    return SequenceLayout(
        num_queries=length,
        num_keys=length,
        position_ids_BS=position_ids_BS,
        document_ids_BS=document_ids_BS,
        token_mask_BS=token_mask_BS,
        device=device,
    )
