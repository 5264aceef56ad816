"""`attention=flex`: torch's flex_attention, which skips blocks of tokens that see nothing of each other.

The blocks are found from each block's first and last token and its lowest and highest document, so that no
tensor is quadratic in the tokens. What a kept block holds beyond that is masked token by token.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from afmoe.attention import AttentionPlugin
from afmoe.attention.layout import SequenceLayout
from afmoe.errors import MachineError
from afmoe.hardware import Hardware
from afmoe.moe.grouped_mm import product_dtype
from afmoe.registry import register

log = logging.getLogger(__name__)

BLOCK_SIZE = 128
"""Tokens a block, queries and keys: torch's own choice, which its kernels are tuned for."""
_SMALLEST_HEAD_ON_CUDA = 16

_NO_BACKWARD = (
    "attention=flex cannot train on a CPU: torch's flex_attention has no backward there; use attention=sdpa"
)


@register("attention", "flex")
class FlexAttention(AttentionPlugin):
    """Compiled on a GPU. On a CPU torch's unfused form: forward only, with a matrix of all scores."""

    @dataclass(kw_only=True)
    class Config:
        pass

    @classmethod
    def why_not(
        cls, config: Config, *, hardware: Hardware, head_dim: int, dropout: float, is_training: bool
    ) -> str | None:
        if is_training and dropout:
            return (
                "attention=flex cannot drop attention weights, and model.attention_dropout is "
                f"{dropout}; set it to 0 or use attention=sdpa"
            )
        if is_training and not hardware.is_cuda:
            return _NO_BACKWARD
        if hardware.is_cuda and head_dim < _SMALLEST_HEAD_ON_CUDA:
            return (
                f"attention=flex needs a head_dim of at least {_SMALLEST_HEAD_ON_CUDA} on a GPU, "
                f"model.head_dim is {head_dim}; use attention=sdpa"
            )
        return None

    @classmethod
    def why_no_static_cache(cls, *, device_type: str, is_compiled: bool) -> str | None:
        if is_compiled and device_type == "cpu":
            return (
                "attention=flex cannot be in a compiled step on a CPU: its kernel there takes no mask "
                "that the same graph makes; use attention=sdpa"
            )
        return None

    def prepare(self, layout: SequenceLayout) -> tuple[BlockMask | None, BlockMask | None]:
        """The block masks of full and of sliding layers; None where every query sees every key."""
        if layout.num_cached:
            return _dense_mask(layout.visible(None)), _dense_mask(layout.visible_in_cache(self.window))
        return block_mask(layout, None), block_mask(layout, self.window)

    def __call__(
        self,
        query_BSHC: Tensor,
        key_BSGC: Tensor,
        value_BSGC: Tensor,
        prepared: tuple[BlockMask | None, BlockMask | None],
        *,
        is_sliding: bool,
        dropout: float,
    ) -> Tensor:
        if dropout:
            raise MachineError("attention=flex cannot drop attention weights; use attention=sdpa")
        dtype = product_dtype(value_BSGC)
        query_BHSC, key_BGSC, value_BGSC = (
            x.to(dtype).transpose(1, 2) for x in (query_BSHC, key_BSGC, value_BSGC)
        )
        if not query_BHSC.is_cuda and query_BHSC.requires_grad:
            raise MachineError(_NO_BACKWARD)
        mixed_BHSC = _flex(query_BHSC, key_BGSC, value_BGSC, prepared[is_sliding])
        return mixed_BHSC.transpose(1, 2)


def _flex(query_BHSC: Tensor, key_BGSC: Tensor, value_BGSC: Tensor, mask: BlockMask | None) -> Tensor:
    function: Any = flex_attention
    if query_BHSC.is_cuda and not torch.compiler.is_compiling():
        function = _compiled_flex()
    if query_BHSC.is_cuda or torch.compiler.is_compiling():
        return function(query_BHSC, key_BGSC, value_BGSC, block_mask=mask, enable_gqa=True)
    _say_once_what_a_cpu_does()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return function(query_BHSC, key_BGSC, value_BGSC, block_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


@cache
def _say_once_what_a_cpu_does() -> None:
    log.warning(
        "attention=flex on a CPU is torch's unfused form: forward only, in memory quadratic in the sequence"
    )


def block_mask(layout: SequenceLayout, window: int | None) -> BlockMask:
    """Which blocks of keys a block of queries looks at, and which of them need no mask inside.

    For a layout without cached tokens. `window` None: no limit.
    """
    blocks = kept_blocks(layout, window)
    is_partial = blocks.is_kept & ~blocks.is_whole
    return BlockMask.from_kv_blocks(
        *_listed(is_partial),
        *_listed(blocks.is_whole),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=_mask_of(layout.document_ids_BS, window),
        seq_lengths=(layout.num_queries, layout.num_keys),
    )


class Blocks(NamedTuple):
    """Pairs of a block of queries and one of keys, [B or 1, query blocks, key blocks]."""

    is_kept: Tensor
    """False: no query of the one sees a key of the other."""
    is_whole: Tensor
    """Every query sees every key."""


def kept_blocks(layout: SequenceLayout, window: int | None) -> Blocks:
    num_blocks = -(-layout.num_keys // BLOCK_SIZE)
    firsts = torch.arange(num_blocks, device=layout.device) * BLOCK_SIZE
    lasts = (firsts + BLOCK_SIZE - 1).clamp(max=layout.num_keys - 1)
    is_kept = firsts <= lasts[:, None]
    is_whole = lasts <= firsts[:, None]
    if window is not None:
        is_kept = is_kept & (lasts > firsts[:, None] - window)
        is_whole = is_whole & (firsts > lasts[:, None] - window)
    is_kept, is_whole = is_kept[None], is_whole[None]
    if layout.document_ids_BS is None:
        return Blocks(is_kept, is_whole)
    # ids need not be in order (padding has the lowest of all): ranges that do not meet share no document
    missing = num_blocks * BLOCK_SIZE - layout.num_keys
    documents_BS = layout.document_ids_BS
    documents_BS = torch.cat((documents_BS, documents_BS[:, -1:].expand(-1, missing)), dim=1)
    low, high = documents_BS.unflatten(1, (num_blocks, BLOCK_SIZE)).aminmax(dim=2)
    is_kept = is_kept & (low[:, None, :] <= high[:, :, None]) & (high[:, None, :] >= low[:, :, None])
    is_one = low == high
    is_same = low[:, None, :] == low[:, :, None]
    return Blocks(is_kept, is_whole & is_same & is_one[:, None, :] & is_one[:, :, None])


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen for each block of queries, and their indices, those first."""
    counts = chosen.sum(-1, dtype=torch.int32)
    indices = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[:, None], indices[:, None]


def _mask_of(documents_BS: Tensor | None, window: int | None) -> Any:
    """The rule of `SequenceLayout`, for one query and one key."""

    def within(query: Tensor, key: Tensor) -> Tensor:
        is_seen = key <= query
        return is_seen if window is None else is_seen & (key > query - window)

    if documents_BS is None:
        return lambda row, head, query, key: within(query, key)
    return lambda row, head, query, key: (
        within(query, key) & (documents_BS[row, query] == documents_BS[row, key])
    )


def _dense_mask(visible: Tensor | None) -> BlockMask | None:
    """A mask of few queries, [B or 1, queries, keys], as a block mask that keeps every block."""
    if visible is None:
        return None
    is_shared = visible.shape[0] == 1
    num_queries, num_keys = visible.shape[1:]
    shape = (visible.shape[0], -(-num_queries // BLOCK_SIZE), -(-num_keys // BLOCK_SIZE))
    counts, indices = _listed(torch.ones(shape, dtype=torch.bool, device=visible.device))
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=lambda row, head, query, key: visible[0 if is_shared else row, query, key],
        seq_lengths=(num_queries, num_keys),
    )
