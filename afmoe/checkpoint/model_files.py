"""The weights of a model directory, checked against what its config asks for, read layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from afmoe.checkpoint.layouts import (
    ROUTER,
    convert,
    convert_layer,
    expert_key,
    is_runtime_state,
    is_selection_bias,
    layer_of,
    layer_prefix,
    name_in_layout,
)
from afmoe.checkpoint.marker import directory_layout
from afmoe.checkpoint.model_directory import EMBEDDING, HEAD
from afmoe.checkpoint.tensor_file import TensorReader
from afmoe.errors import ConfigError

log = logging.getLogger(__name__)


class ModelFiles:
    """Safetensors in any layout behind canonical names.

    `expected`: every canonical key with its shape (meta tensors will do). Only the files' tables are read
    before a tensor is asked for. Raises `ConfigError` naming file and key when anything is missing, left over
    or misshapen.
    """

    def __init__(self, directory: Path, expected: Mapping[str, Tensor]) -> None:
        self.directory = directory
        self.reader = TensorReader(directory)
        found = self.reader.specs()
        self.layout = directory_layout(directory, found)
        self.specs = {key: spec for key, spec in found.items() if not is_runtime_state(key)}
        """Shape and dtype of each weight, under its key in the files."""
        self.dropped = sorted(found.keys() - self.specs.keys())
        """Keys of a trainer's state, no weights."""
        self.absent = _check_keys(self.reader, self.specs, expected, self.layout)
        """Canonical keys that no file holds and that are zero then: the selection biases of a model without
        any."""
        self._expected = expected
        self._check_tied_head()
        self._keys: dict[int | None, list[str]] = {}
        for key in self.specs:
            self._keys.setdefault(layer_of(key), []).append(key)
        # a head equal to the embedding that the config ties it to is no weight of its own
        self.top_keys = [key for key in self._keys.pop(None, []) if key in expected]
        self.layers = sorted(layer for layer in self._keys if layer is not None)

    def keys_of(self, layer: int) -> list[str]:
        """The keys of one layer, as the files have them."""
        return self._keys[layer]

    def read_top(self, key: str) -> Tensor:
        """Embedding, final norm or head."""
        return self.reader.read([key])[key]

    def read_layer(
        self, layer: int, target: str = "canonical", expert_range: range | None = None
    ) -> dict[str, Tensor]:
        """The tensors of one layer under their names in layout `target`.

        `expert_range`: read the weights of these consecutive experts only, which become numbers 0, 1, ...;
        router and everything else come whole.
        """
        state = self._read(layer, expert_range)
        if not self.absent:
            return convert_layer(state, layer, self.layout, target)
        tensors = convert_layer(state, layer, self.layout, "canonical")
        tensors |= {
            key: torch.zeros(self._expected[key].shape) for key in self.absent if layer_of(key) == layer
        }
        return convert_layer(tensors, layer, "canonical", target)

    def _read(self, layer: int, expert_range: range | None) -> dict[str, Tensor]:
        if expert_range is None or layer_prefix(layer) + ROUTER not in self._expected:
            return self.reader.read(self._keys[layer])
        num_experts = self._expected[layer_prefix(layer) + ROUTER].shape[0]
        is_slice = expert_range.step == 1 and 0 <= expert_range.start < expert_range.stop <= num_experts
        assert is_slice, f"{expert_range} is no slice of {num_experts} experts"
        state: dict[str, Tensor] = {}
        for key in self._keys[layer]:
            expert = expert_key(key)
            if expert is None:
                state |= self.reader.read([key])
            elif expert.number is None:
                state[key] = self.reader.read_rows(key, expert_range)
            elif expert.number in expert_range:
                own = expert.renumbered(expert.number - expert_range.start)
                state[own] = self.reader.read([key])[key]
        return state

    def _check_tied_head(self) -> None:
        if HEAD not in self.specs or HEAD in self._expected:
            return
        if not torch.equal(self.read_top(HEAD), self.read_top(EMBEDDING)):
            raise ConfigError(
                f"{self.reader.file_of(HEAD)}: tie_word_embeddings is true, but {HEAD} is not equal to "
                f"{EMBEDDING}"
            )


def _check_keys(
    reader: TensorReader, found: Mapping[str, Tensor], canonical: Mapping[str, Tensor], layout: str
) -> set[str]:
    """Compare the files' keys and shapes with those that the model has in `layout`; returns `absent`."""
    expected = convert(canonical, "canonical", layout)
    names: dict[str, str] = {}
    for key in found:
        if key == HEAD and HEAD not in expected:
            continue
        name = name_in_layout(key, layout)
        if name in names:
            raise ConfigError(f"{reader.directory}: two selection biases, {names[name]} and {key}: keep one")
        names[name] = key
    # a tensor without elements may be left out: the shared expert that transformers keeps for
    # num_shared_experts=0
    missing = {key for key, tensor in expected.items() if key not in names and tensor.numel()}
    absent: set[str] = set()
    if layout in ("prime", "canonical") and not any(is_selection_bias(key) for key in found):
        absent = {key for key in missing if is_selection_bias(key)}
        missing -= absent
        if absent:
            log.warning("%s holds no selection bias: starting from zero", reader.directory)
    unexpected = [
        f"{key} (in {reader.file_of(key).name})" for name, key in names.items() if name not in expected
    ]
    misshapen = [
        f"{key} (in {reader.file_of(key).name}: {_shape(found[key])}, config says {_shape(expected[name])})"
        for name, key in names.items()
        if name in expected
        and (found[key].shape != expected[name].shape or not found[key].is_floating_point())
    ]
    problems = {"missing": sorted(missing), "unexpected": unexpected, "misshapen": misshapen}
    if any(problems.values()):
        raise ConfigError(
            f"{reader.directory}: the weights (layout {layout}) do not fit config.json: "
            + "; ".join(f"{len(keys)} {kind}: {_first_ten(keys)}" for kind, keys in problems.items() if keys)
        )
    return {name_in_layout(key, "canonical") for key in absent}


def _first_ten(keys: list[str]) -> str:
    return ", ".join(keys[:10]) + (", ..." if len(keys) > 10 else "")


def _shape(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return f"{list(tensor.shape)}{kind}"
