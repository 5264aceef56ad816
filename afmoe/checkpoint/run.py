"""Run checkpoints: what a killed run continues from, bit for bit.

    checkpoints/step-000100/
        model.safetensors    the model's tensors under their canonical names, `selection_bias` in fp32
        training_state.pt    the rest of Lightning's checkpoint: optimizers, schedules, loops, callbacks, data
        complete             written last: step, versions, sizes and checksums
    checkpoints/last         the name of the newest whole one

`training_state.pt` holds plain containers, tensors, numbers and strings, so it is read with
`weights_only=True`: a checkpoint from elsewhere cannot run code. Tensors may be deferred (`deferred.py`): one
at a time is made and written. Both files are mapped when read: what is resident is what was looked at. The
rest of the directory's rules are in `directory.py`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afmoe.checkpoint import tensor_file
from afmoe.checkpoint.atomic import flush, new_directory
from afmoe.checkpoint.deferred import DeferredTensor, deferred_tensors
from afmoe.checkpoint.directory import checkpoint_step, point_last, read_marker, write_marker
from afmoe.checkpoint.state_file import write_state
from afmoe.errors import ConfigError

STATE = "training_state.pt"
_WEIGHTS = "state_dict"
_RECORD = "weights_record"
# the tensor that every model of ours has: what stands before its name is what wrappers added
_ANCHOR = "model.embed_tokens.weight"


def write_checkpoint(directory: Path | str, state: Mapping[str, Any]) -> None:
    """Write Lightning's checkpoint dict as the directory `.../checkpoints/step-000100`, whole or not at all.

    Raises `ConfigError` for a name without a step and for a value that is no plain data, with the path of
    keys to it; `MachineError` when the disk refuses.
    """
    directory = Path(directory)
    step = checkpoint_step(directory)
    weights, rest = _split(state)
    with new_directory(directory) as temporary:
        tensor_file.write_tensors(temporary, weights)
        write_state(temporary / STATE, rest)
        # the marker vouches for files that are on the disk, not in memory
        flush(temporary)
        write_marker(temporary, step, versions())
    point_last(directory)


def take_part(state: Mapping[str, Any]) -> None:
    """On a rank that does not write: make each deferred tensor, in the order of `write_checkpoint`.

    On the one that does: those that are left when the disk refuses, since the other ranks make them.
    """
    for tensor in deferred_tensors(_split(state)):
        if not tensor.is_made:
            tensor.make()


def read_checkpoint(directory: Path | str) -> dict[str, Any]:
    """Lightning's checkpoint dict as it was given to `write_checkpoint`, on the CPU."""
    directory = Path(directory)
    # raises when the directory is not whole
    read_marker(directory)
    # mapped: ranks of one machine that read it together hold it once, and each only what it takes
    state = torch.load(directory / STATE, map_location="cpu", weights_only=True, mmap=True)
    record = state.pop(_RECORD)
    reader = tensor_file.TensorReader(directory)
    tensors = reader.read(reader.specs())
    tensors |= {alias: tensors[name] for alias, name in record["aliases"].items()}
    state[_WEIGHTS] = {record["prefix"] + name: tensor for name, tensor in tensors.items()} | record["others"]
    return state


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor | DeferredTensor], dict[str, Any]]:
    """What goes to either file."""
    weights, record = _split_weights(state[_WEIGHTS])
    rest = {key: value for key, value in state.items() if key != _WEIGHTS} | {_RECORD: record}
    return weights, plain(rest)


def _split_weights(state: Mapping[str, Any]) -> tuple[dict[str, Tensor | DeferredTensor], dict[str, Any]]:
    """The model's tensors by canonical name, and what else it takes to rebuild the module's state dict."""
    anchor = next((key for key in state if key.endswith(_ANCHOR)), _ANCHOR)
    prefix = anchor.removesuffix(_ANCHOR)
    weights: dict[str, Tensor | DeferredTensor] = {}
    record: dict[str, Any] = {"prefix": prefix, "aliases": {}, "others": {}}
    names: dict[Any, str] = {}
    for key, value in state.items():
        if not key.startswith(prefix) or not isinstance(value, (Tensor, DeferredTensor)):
            record["others"][key] = value
            continue
        name = key.removeprefix(prefix)
        # tied weights are one tensor under two names, and are written once
        identity = _identity(value)
        if identity in names:
            record["aliases"][name] = names[identity]
        else:
            names[identity] = name
            weights[name] = value
    return weights, record


def _identity(tensor: Tensor | DeferredTensor) -> Any:
    # an empty tensor has no place in memory to know it by
    if isinstance(tensor, DeferredTensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def plain(value: Any, path: str = "") -> Any:
    """`value` with plain containers, tensors, numbers and strings only, which `weights_only=True` can read.

    Subclasses become their plain kind (`OrderedDict` a dict, a named tuple a tuple, a numpy number a Python
    one). Raises `ConfigError` for anything else, with the keys that lead to it.
    """
    if value is None or type(value) in (bool, int, float, str, DeferredTensor):
        return value
    if type(value) is Tensor or isinstance(value, nn.Parameter):
        value = value.detach()
        # a view would be saved with all of the storage that it looks into
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, Mapping):
        return {_plain_key(key, path): plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return plain(value.item(), path)
    if isinstance(value, (int, float, str)) and not isinstance(value, Enum):
        base = next(kind for kind in (int, float, str) if isinstance(value, kind))
        return base(value)
    raise ConfigError(
        f"checkpoint{path} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds only "
        "plain containers, tensors, numbers and strings: convert it in the state_dict that gives it"
    )


def _plain_key(key: Any, path: str) -> Any:
    key = plain(key, f"{path}.keys()")
    if not isinstance(key, (bool, int, float, str, type(None))):
        raise ConfigError(f"checkpoint{path} has the key {key!r}; keys are strings or numbers")
    return key


def versions() -> dict[str, str]:
    """What wrote a checkpoint."""
    packages = ("afmoe-recipe", "torch", "lightning")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
