"""A tensor of a checkpoint that is made when it is written, and dropped after.

A sharded run has no whole tensor until its ranks bring one together. So its state holds `DeferredTensor`s:
the rank that writes makes them one at a time, and every other rank makes the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class DeferredTensor:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        """`make` may communicate, and may give a view of a live tensor."""
        self.spec = torch.empty(shape, dtype=dtype, device="meta")
        self._make = make
        self.is_made = False

    def make(self) -> Tensor:
        self.is_made = True
        tensor = self._make()
        assert tensor.shape == self.spec.shape, f"{tuple(tensor.shape)} is not what was announced"
        assert tensor.dtype == self.spec.dtype, f"{tensor.dtype} is not what was announced"
        return tensor


def deferred_tensors(state: Any) -> Iterator[DeferredTensor]:
    """Those in nested containers, each once, in the order in which they stand there."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[DeferredTensor]:
        if isinstance(value, DeferredTensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from walk(item)

    return walk(state)
