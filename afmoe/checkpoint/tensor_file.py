"""Tensors in safetensors files: one tensor at a time, in one file or in shards with an index.

Reading goes through the safetensors library's memory map, so what is resident is the tensor asked for.
Writing is ours (the format is eight bytes of length, a JSON table, the raw data) because the library wants
all tensors of a file at once, while a conversion holds one layer. Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from afmoe.checkpoint.deferred import DeferredTensor
from afmoe.errors import ConfigError, MachineError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 1 << 24
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorReader:
    """The tensors of a model directory, by key. Nothing but the tables is read before `read` is called."""

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigError` for no weights, other formats, a missing, truncated or foreign file."""
        self.directory = directory
        self._files = {}
        self._file_of: dict[str, str] = {}
        names, promised = _shards(directory)
        for name in names:
            file = self._open(name)
            for key in file.keys():  # noqa: SIM118
                if key in self._file_of:
                    raise ConfigError(f"{directory}: {key} is in both {self._file_of[key]} and {name}")
                self._file_of[key] = name
        for key, name in promised.items():
            if self._file_of.get(key) != name:
                raise ConfigError(f"{directory / INDEX} promises {key} in {name}, which does not hold it")

    def specs(self) -> dict[str, Tensor]:
        """Shape and dtype of every tensor, as tensors on the meta device."""
        specs = {}
        for key, name in self._file_of.items():
            view = self._files[name].get_slice(key)
            if view.get_dtype() not in _DTYPES:
                raise ConfigError(f"{self.file_of(key)}: {key} has the unsupported type {view.get_dtype()}")
            specs[key] = torch.empty(view.get_shape(), dtype=_DTYPES[view.get_dtype()], device="meta")
        return specs

    def file_of(self, key: str) -> Path:
        return self.directory / self._file_of[key]

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        return {key: self._files[self._file_of[key]].get_tensor(key) for key in keys}

    def read_rows(self, key: str, rows: range) -> Tensor:
        """Consecutive rows of a tensor: only their bytes are read."""
        return self._files[self._file_of[key]].get_slice(key)[rows.start : rows.stop]

    def _open(self, name: str):
        path = self.directory / name
        try:
            self._files[name] = safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing; {self.directory / INDEX} names it") from error
        except SafetensorError as error:
            raise ConfigError(f"{path} is truncated or no safetensors file: {error}") from error
        except RuntimeError as error:
            # Linux refuses to map a single file that is larger than the machine's memory
            if "unable to mmap" not in str(error):
                raise
            raise MachineError(
                f"{path} ({path.stat().st_size / 1e9:.1f} GB) cannot be mapped into this machine's memory: "
                "split the weights into shards, or take a larger machine"
            ) from error
        return self._files[name]


def _shards(directory: Path) -> tuple[list[str], dict[str, str]]:
    """File names that hold the weights of `directory`, and key to file as its index says."""
    index = directory / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted(set(weight_map.values())), weight_map
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is no index of safetensors files: {error!r}") from error
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS], {}
    if any(directory.glob("*.distcp")):
        raise ConfigError(
            f"{directory} is a distributed (DCP) checkpoint, not safetensors; convert it with "
            f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {directory} FILE` and save "
            "the tensors of FILE as safetensors"
        )
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ConfigError(
            f"{directory} holds pickled weights; only safetensors are read, because unpickling can run code"
        )
    raise ConfigError(f"{directory} holds neither {WEIGHTS} nor {INDEX}")


class TensorWriter:
    """Writes tensors, in any order, into one file or into shards of at most `max_shard_size` bytes with an
    index.

    `specs` gives shape and dtype of every key beforehand (tensors on any device, meta included): places in
    the files are fixed from the start, so a tensor can be dropped as soon as it is written.
    """

    def __init__(self, directory: Path, specs: Mapping[str, Tensor], max_shard_size: int) -> None:
        self._specs = dict(specs)
        self._places: dict[str, tuple[Path, int]] = {}
        self._written: set[str] = set()
        # one at a time: a process may have 1,024 open files, and keys come in the order of the shards
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        shards = _pack(self._specs, max_shard_size)
        weight_map = {}
        for number, keys in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._start_file(directory / name, keys)
            weight_map.update(dict.fromkeys(keys, name))
        if len(shards) > 1:
            metadata = {
                "total_parameters": sum(spec.numel() for spec in self._specs.values()),
                "total_size": sum(_num_bytes(spec) for spec in self._specs.values()),
            }
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors in the dtypes announced. Raises `ConfigError` for a value too large for its dtype."""
        for key, tensor in tensors.items():
            spec = self._specs[key]
            assert tensor.shape == spec.shape, f"{key} is not what was announced"
            path, offset = self._places[key]
            if tensor.numel():
                file = self._open(path)
                file.seek(offset)
                # in pieces: a cast embedding of a large model would take gigabytes
                for piece in tensor.detach().contiguous().reshape(-1).split(_PIECE):
                    file.write(_cast(key, piece, spec.dtype).cpu().view(torch.uint8).numpy().data)
            self._written.add(key)

    def close(self) -> None:
        """Finish the files. Every key of `specs` must have been written."""
        self._close_file()
        missing = self._specs.keys() - self._written
        assert not missing, f"announced but not written: {sorted(missing)[:10]}"

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        if error_type is None:
            self.close()
            return
        # the first error is the one to show; flushing what is buffered may fail for the same reason
        with suppress(OSError):
            self._close_file()

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or path != self._path:
            self._close_file()
            self._path, self._file = path, path.open("r+b")
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _start_file(self, path: Path, keys: list[str]) -> None:
        # widest type first: every tensor then starts at a multiple of its item size, which readers rely on
        keys = sorted(keys, key=lambda key: -self._specs[key].element_size())
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for key in keys:
            spec = self._specs[key]
            offsets[key], end = end, end + _num_bytes(spec)
            table[key] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offsets[key], end],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        for key in keys:
            self._places[key] = (path, 8 + len(text) + offsets[key])


def _cast(key: str, piece: Tensor, dtype: torch.dtype) -> Tensor:
    if piece.dtype == dtype:
        return piece
    cast = piece.to(dtype)
    # of the usual types only fp16 ends early, at 65,504
    if torch.finfo(dtype).max < torch.finfo(piece.dtype).max:
        is_lost = piece.isfinite() & ~cast.isfinite()
        if is_lost.any():
            largest = piece[is_lost].abs().max().item()
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"{key} holds {largest:.4g}, too large for {name}; choose bfloat16 or float32")
    return cast


def write_tensors(directory: Path, tensors: Mapping[str, Tensor | DeferredTensor]) -> None:
    """Write `tensors` in their order to the one file `model.safetensors` of `directory`."""
    specs = {
        key: value.spec if isinstance(value, DeferredTensor) else value for key, value in tensors.items()
    }
    total = sum(_num_bytes(spec) for spec in specs.values())
    with TensorWriter(directory, specs, max_shard_size=max(total, 1)) as writer:
        for key, value in tensors.items():
            writer.write({key: value.make() if isinstance(value, DeferredTensor) else value})


def _pack(specs: Mapping[str, Tensor], max_shard_size: int) -> list[list[str]]:
    """Fill shards with keys in order; a tensor larger than `max_shard_size` gets a shard of its own."""
    if max_shard_size < 1:
        raise ConfigError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
    shards: list[list[str]] = [[]]
    size = 0
    for key, spec in specs.items():
        if shards[-1] and size + _num_bytes(spec) > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += _num_bytes(spec)
    return shards


def _num_bytes(spec: Tensor) -> int:
    return spec.numel() * spec.element_size()
