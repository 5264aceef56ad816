"""Bytes of the tensors that are alive, counted storage by storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """What the operations inside make, each storage once, for as long as anything holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        inputs = tree_leaves((args, kwargs))
        given = {tensor.untyped_storage()._cdata for tensor in inputs if isinstance(tensor, Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                # a view, or a result written in place, of something that is older
                if storage._cdata not in given:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return output

    @property
    def bytes(self) -> int:
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        return sum(size for _, size in self._storages.values())
