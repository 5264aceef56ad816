"""A cache of fixed size: every step of generation has the same shapes, so one compiled step serves them all.

A token's keys and values lie in the slot of its position; a sliding layer has a ring of as many slots as its
window, where a new token takes the place of the one that nobody sees any more. Padding has no slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.attention.layout import SequenceLayout
from afmoe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SlotLayout(SequenceLayout):
    """One new token a row, whose keys are the slots of a `StaticCache`: `num_keys` of them, rings shorter.

    Slots are filled from the first to the last, so that those up to the token's position are its document's.
    In a ring the others hold the window's tokens once it has gone round.
    """

    def visible(self, window: int | None, first_key: int = 0) -> Tensor:
        num_slots = self.num_keys if window is None else min(window, self.num_keys)
        return torch.arange(num_slots, device=self.device) <= self.position_ids_BS[:, :, None]


class StaticCache:
    """Made empty; its first forward takes the prompts, each further one a single token a row."""

    def __init__(self, windows: list[int | None], capacity: int) -> None:
        """`windows`: one entry a layer, None for a layer that sees everything. `capacity`: tokens a row."""
        sizes = [capacity if window is None else min(window, capacity) for window in windows]
        self.layers = [_SlotLayer(self, size) for size in sizes]
        self.capacity = capacity
        self.is_filled = False
        self.num_tokens_B1 = torch.empty(0)
        """Tokens of each row that the cache has seen, padding and earlier documents left out, int64."""

    def extend(self, layout: SequenceLayout) -> SequenceLayout:
        """The layout of the new tokens behind the cached ones. Raises `ConfigError` when they do not fit."""
        if not self.is_filled:
            if layout.num_queries > self.capacity:
                raise ConfigError(
                    f"a prompt of {layout.num_queries} tokens needs a static cache of at least as many, "
                    f"this one has a capacity of {self.capacity}"
                )
            self.is_filled = True
            # positions start at 0 with each row's last document
            self.num_tokens_B1 = layout.position_ids_BS[:, -1:] + 1
            return layout
        if layout.num_queries != 1:
            raise ConfigError(
                f"a static cache continues by one token a row, got {layout.num_queries}; use cache=growing"
            )
        position_ids_B1 = self.num_tokens_B1.clone()
        # in place: the compiled step reads and writes the same memory each time
        self.num_tokens_B1 += 1
        return SlotLayout(
            num_queries=1,
            num_keys=self.capacity,
            position_ids_BS=position_ids_B1,
            document_ids_BS=None,
            token_mask_BS=None,
            device=layout.device,
        )


class _SlotLayer:
    def __init__(self, cache: StaticCache, num_slots: int) -> None:
        self.cache = cache
        self.num_slots = num_slots
        self.key_BSGC: Tensor | None = None
        self.value_BSGC: Tensor | None = None

    def update(self, key_BSGC: Tensor, value_BSGC: Tensor) -> tuple[Tensor, Tensor]:
        """The prompts' own keys and values at first, then all slots."""
        if self.key_BSGC is None or self.value_BSGC is None:
            columns_BS = self._columns(key_BSGC.shape[1])[:, :, None, None]
            self.key_BSGC, self.value_BSGC = (
                torch.take_along_dim(x, columns_BS, dim=1) for x in (key_BSGC, value_BSGC)
            )
            return key_BSGC, value_BSGC
        slots_B1 = (self.cache.num_tokens_B1 - 1) % self.num_slots
        slots = slots_B1[:, :, None, None].expand(-1, -1, *key_BSGC.shape[2:])
        self.key_BSGC.scatter_(1, slots, key_BSGC)
        self.value_BSGC.scatter_(1, slots, value_BSGC)
        return self.key_BSGC, self.value_BSGC

    def _columns(self, length: int) -> Tensor:
        """For each slot the column of the prompts [B, length] that it holds; any for a slot to come."""
        last_B1 = self.cache.num_tokens_B1 - 1
        slots = torch.arange(self.num_slots, device=last_B1.device)
        # the last position that falls into this slot
        positions_BS = last_B1 - (last_B1 - slots) % self.num_slots
        return (positions_BS + (length - 1 - last_B1)).clamp(min=0)
