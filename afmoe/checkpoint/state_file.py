"""Nested state as the file that `torch.save` writes, byte for byte on the CPU, one tensor at a time.

`torch.save` wants every tensor at once; here a `DeferredTensor` is made when its turn comes. The file is a
zip archive: a pickle in which a storage is a number, then the storages' bytes in the order of the numbers.
`torch.load(path, weights_only=True)` reads it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import UntypedStorage
from torch._utils import _rebuild_tensor_v2
from torch.storage import TypedStorage

from afmoe.checkpoint.deferred import DeferredTensor


def write_state(path: Path, state: Any) -> None:
    """Write plain containers, tensors and deferred tensors, the latter made in the order of `state`."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(state)
    try:
        with path.open("wb") as file:
            archive = _archive(file)
            _write(archive, "data.pkl", text.getvalue())
            _write(archive, ".format_version", b"1")
            _write(archive, ".storage_alignment", str(_alignment()).encode())
            _write(archive, "byteorder", sys.byteorder.encode())
            for number, source in enumerate(pickler.sources):
                _write_storage(archive, f"data/{number}", source)
            archive.write_end_of_file()
    except RuntimeError as error:
        # torch's archive writer hides the disk's answer behind a complaint about file positions
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


class _DeferredStorage:
    def __init__(self, tensor: DeferredTensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """Numbers the storages that it meets and leaves their bytes out."""

    def __init__(self, file: io.BytesIO) -> None:
        # the protocol of torch.save
        super().__init__(file, protocol=2)
        self.sources: list[UntypedStorage | DeferredTensor] = []
        self._numbers: dict[int, str] = {}

    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(obj, DeferredTensor):
            return NotImplemented
        spec = obj.spec
        arguments = (_DeferredStorage(obj), 0, tuple(spec.shape), spec.stride(), False, OrderedDict())
        return _rebuild_tensor_v2, arguments

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, _DeferredStorage):
            spec = obj.tensor.spec
            kind = TypedStorage(dtype=spec.dtype, device="meta", _internal=True)._pickle_storage_type()
            return self._reference(obj.tensor, id(obj.tensor), getattr(torch, kind), spec.numel())
        if isinstance(obj, TypedStorage):
            storage = obj._untyped_storage
            kind = getattr(torch, obj._pickle_storage_type())
            return self._reference(storage, storage._cdata, kind, obj._size())
        return None

    def _reference(
        self, source: UntypedStorage | DeferredTensor, identity: int, kind: type, numel: int
    ) -> tuple[Any, ...]:
        if identity not in self._numbers:
            self._numbers[identity] = str(len(self.sources))
            self.sources.append(source)
        return ("storage", kind, self._numbers[identity], "cpu", numel)


def _archive(file: Any) -> Any:
    return torch._C.PyTorchFileWriter(file, torch.serialization.get_crc32_options(), _alignment())


def _alignment() -> int:
    from torch.utils.serialization import config

    return config.save.storage_alignment


def _write(archive: Any, name: str, content: bytes) -> None:
    archive.write_record(name, content, len(content))


def _write_storage(archive: Any, name: str, source: UntypedStorage | DeferredTensor) -> None:
    if isinstance(source, DeferredTensor):
        tensor = source.make().detach().cpu().contiguous()
        # a view would be written with all of the storage that it looks into
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
        storage = (tensor.clone() if is_view else tensor).untyped_storage()
    else:
        storage = source.cpu()
    archive.write_record(name, storage, storage.nbytes())
