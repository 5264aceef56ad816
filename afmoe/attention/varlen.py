"""The rows of a batch as the sequences that a kernel for different lengths takes, and back.

Such a kernel reads queries and keys of all sequences behind each other, with the positions at which each
ends. Every document of a row is a sequence of its own, which is how nothing is seen across a border; padding
is taken out before and comes back as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.attention.layout import PADDING, SequenceLayout


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What a kernel has to know of the sequences, in the kernel's own terms."""

    query_indices: Tensor | None
    """Places of the real queries in the flattened [B*S]; None: all of them."""
    key_indices: Tensor | None
    query_ends: Tensor
    """`cu_seqlens_q`, int32 [sequences + 1]: 0, then the end of each sequence."""
    key_ends: Tensor
    """`cu_seqlens_k`. A sequence may have more keys than queries: the queries are then its last tokens."""
    longest_query: int
    longest_key: int


def sequences(layout: SequenceLayout, window: int | None) -> Sequences:
    """The sequences of full layers (`window` None) or of sliding layers.

    Waits for the device where rows are padded or packed: how many sequences there are stands in the data.
    """
    first_key = layout.first_key(window)
    if layout.document_ids_BS is None:
        num_keys = layout.num_keys - first_key
        return Sequences(
            query_indices=None,
            key_indices=None,
            query_ends=_even_ends(layout.batch_size, layout.num_queries, layout.device),
            key_ends=_even_ends(layout.batch_size, num_keys, layout.device),
            longest_query=layout.num_queries,
            longest_key=num_keys,
        )
    if layout.num_cached:
        return _continued(layout, layout.document_ids_BS[:, first_key:])
    return _documents(layout.document_ids_BS)


def _even_ends(batch_size: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


def _documents(document_ids_BS: Tensor) -> Sequences:
    """Every document of every row, queries and keys alike."""
    is_real_BS = document_ids_BS != PADDING
    is_first_BS = torch.ones_like(is_real_BS)
    is_first_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    indices = is_real_BS.flatten().nonzero().squeeze(1)
    starts = is_first_BS.flatten()[indices].nonzero().squeeze(1)
    ends = F.pad(starts, (0, 1), value=indices.numel()).to(torch.int32)
    longest = int(ends.diff().max()) if indices.numel() else 0
    return Sequences(
        query_indices=indices,
        key_indices=indices,
        query_ends=ends,
        key_ends=ends,
        longest_query=longest,
        longest_key=longest,
    )


def _continued(layout: SequenceLayout, key_documents_BS: Tensor) -> Sequences:
    """One sequence a row: its new tokens, and what the cache holds of the document that they continue."""
    is_seen_BS = key_documents_BS == key_documents_BS[:, -1:]
    return Sequences(
        query_indices=None,
        key_indices=is_seen_BS.flatten().nonzero().squeeze(1),
        query_ends=_even_ends(layout.batch_size, layout.num_queries, layout.device),
        key_ends=F.pad(is_seen_BS.sum(1).cumsum(0), (1, 0)).to(torch.int32),
        longest_query=layout.num_queries,
        longest_key=key_documents_BS.shape[1],
    )


def varlen_attention(
    kernel: Callable[..., Tensor],
    query_BSHC: Tensor,
    key_BSGC: Tensor,
    value_BSGC: Tensor,
    taken: Sequences,
    *,
    window: int | None,
    dropout: float,
) -> Tensor:
    """The mixed values [B, S, H, C] by `kernel`, zeros on padding.

    `kernel` is called as `flash_attn.flash_attn_varlen_func`: causal, the last query of a sequence aligned
    with its last key, `window_size` (to the left, to the right) without the token itself, -1 without limit.
    """
    query_NHC = _taken(query_BSHC, taken.query_indices)
    if query_NHC.shape[0] == 0:
        return torch.zeros_like(query_BSHC)
    mixed_NHC = kernel(
        query_NHC,
        _taken(key_BSGC, taken.key_indices),
        _taken(value_BSGC, taken.key_indices),
        taken.query_ends,
        taken.key_ends,
        taken.longest_query,
        taken.longest_key,
        dropout_p=dropout,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    if taken.query_indices is None:
        return mixed_NHC.view_as(query_BSHC)
    flat = mixed_NHC.new_zeros(query_BSHC.shape[0] * query_BSHC.shape[1], *mixed_NHC.shape[1:])
    return flat.index_copy(0, taken.query_indices, mixed_NHC).view_as(query_BSHC)


def _taken(x_BSHC: Tensor, indices: Tensor | None) -> Tensor:
    x_THC = x_BSHC.flatten(0, 1)
    return x_THC if indices is None else x_THC.index_select(0, indices)
