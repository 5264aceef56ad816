"""Keys and values of the tokens that generation has seen, so that each new token costs one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from afmoe.attention.layout import SequenceLayout


class LayerCache(Protocol):
    """One layer's keys and values."""

    def update(self, key_BSGC: Tensor, value_BSGC: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values; returns all that the new tokens can see, the new ones last."""
        ...


class KeyValueCache(Protocol):
    """What a forward continues."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    def extend(self, layout: SequenceLayout) -> SequenceLayout:
        """The layout of the new tokens behind the cached ones, which they continue.

        `layout` is that of the new tokens alone; after the first call it holds no padding and no document's
        start.
        """
        ...


class GrowingCache:
    """A cache that grows. Layers with a window keep `window - 1` tokens: all that the next one can see."""

    def __init__(self, windows: list[int | None]) -> None:
        """`windows`: one entry a layer, None for a layer that sees everything."""
        self.layers = [_GrowingLayer(None if window is None else window - 1) for window in windows]
        self.num_tokens = 0
        self._document_ids_BS: Tensor | None = None
        self._next_position_B1: Tensor | None = None

    def extend(self, layout: SequenceLayout) -> SequenceLayout:
        if self.num_tokens:
            layout = self._continued(layout)
        self.num_tokens = layout.num_keys
        self._document_ids_BS = layout.document_ids_BS
        self._next_position_B1 = layout.position_ids_BS[:, -1:] + 1
        return layout

    def _continued(self, layout: SequenceLayout) -> SequenceLayout:
        assert self._next_position_B1 is not None
        documents = self._document_ids_BS
        if documents is not None:
            new = documents[:, -1:].expand(-1, layout.num_queries)
            documents = torch.cat((documents, new), dim=1)
        return dataclasses.replace(
            layout,
            num_keys=self.num_tokens + layout.num_queries,
            position_ids_BS=self._next_position_B1 + layout.position_ids_BS,
            document_ids_BS=documents,
        )


class _GrowingLayer:
    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.key_BSGC: Tensor | None = None
        self.value_BSGC: Tensor | None = None

    def update(self, key_BSGC: Tensor, value_BSGC: Tensor) -> tuple[Tensor, Tensor]:
        if self.key_BSGC is not None and self.value_BSGC is not None:
            key_BSGC = torch.cat((self.key_BSGC, key_BSGC), dim=1)
            value_BSGC = torch.cat((self.value_BSGC, value_BSGC), dim=1)
        self.key_BSGC, self.value_BSGC = self._kept(key_BSGC), self._kept(value_BSGC)
        return key_BSGC, value_BSGC

    def _kept(self, x_BSGC: Tensor) -> Tensor:
        if self.limit is None or x_BSGC.shape[1] <= self.limit:
            return x_BSGC
        # a copy, so that a long prompt's keys do not stay in memory behind a view of the last of them
        return x_BSGC[:, x_BSGC.shape[1] - self.limit :].clone()
