"""Whole models from and to directories of `config.json` and safetensors, in any layout, layer by layer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afmoe.checkpoint.atomic import new_directory, recover
from afmoe.checkpoint.config_file import config_fields, read_config, write_json
from afmoe.checkpoint.layouts import (
    convert,
    convert_layer,
    detect_layout,
    is_runtime_state,
    is_selection_bias,
    layer_of,
    layers_of,
    name_in_layout,
)
from afmoe.checkpoint.memory import check_memory
from afmoe.checkpoint.tensor_file import TensorReader, TensorWriter
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.model import AfmoeForCausalLM

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_SHARD_SIZE = 5_000_000_000
GENERATION_CONFIG = "generation_config.json"

DOCUMENTS = {".gitattributes", "LICENSE", "README.md"}
TOKENIZER_FILES = {
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
_OUR_FILES = {"config.json", GENERATION_CONFIG, "model.safetensors", "model.safetensors.index.json"}


def load_pretrained(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: Any = "sdpa",
    compute: Any = "native",
    dispatch: Any = "local",
    hardware: Hardware | None = None,
) -> AfmoeForCausalLM:
    """The model in `directory`, in any known layout, stored in `dtype` (`selection_bias` in fp32) on the CPU.

    Built without memory, checked against the files' tables, then filled in place layer by layer. Raises
    `ConfigError` naming file and key when anything is missing, left over or misshapen, `MachineError`
    before reading when the model does not fit in memory.
    """
    directory = Path(directory)
    config = read_config(directory)
    with torch.device("meta"):
        model = AfmoeForCausalLM(config, attention, compute, dispatch, hardware)
    model.to(dtype)
    sizes = [tensor.nbytes for tensor in _canonical_state(model).values()]
    # the largest tensor once more: experts are stacked beside the file's own pages
    check_memory(f"loading {directory} in {str(dtype).removeprefix('torch.')}", sum(sizes) + max(sizes))

    reader = TensorReader(directory)
    found = reader.specs()
    layout = detect_layout(found)
    absent = _check_keys(reader, found, model, layout)
    model.to_empty(device="cpu")
    _fill(model, reader, found, layout, absent)
    model.on_weights_updated()
    return model


def save_pretrained(
    model: AfmoeForCausalLM, directory: str | Path, layout: str = "hf", max_shard_size: int = MAX_SHARD_SIZE
) -> None:
    """Write the model's config and weights in `layout`, whole or not at all; shards hold `max_shard_size`
    bytes.

    A tokenizer that lies in `directory` stays. Raises `ConfigError` when transformers cannot express the
    model in layout `hf`, or when the directory holds what is no part of a model.
    """
    fields = config_fields(model.config, layout, storage_dtype(model))
    with replaced_model_directory(Path(directory), DOCUMENTS | TOKENIZER_FILES) as temporary:
        write_model(model, temporary, layout, max_shard_size)
        write_json(temporary / "config.json", fields)
        write_json(temporary / GENERATION_CONFIG, _generation_fields(model.config))


def write_model(model: AfmoeForCausalLM, directory: Path, layout: str, max_shard_size: int) -> None:
    """Write the weights only, into an existing directory."""
    state = _canonical_state(model)
    specs = convert(_specs(state), "canonical", layout)
    with TensorWriter(directory, specs, max_shard_size) as writer:
        writer.write({key: tensor for key, tensor in state.items() if layer_of(key) is None})
        for layer in layers_of(state):
            writer.write(convert_layer(state, layer, "canonical", layout))


@contextmanager
def replaced_model_directory(destination: Path, kept_files: set[str]) -> Iterator[Path]:
    """A directory to fill that becomes `destination`, with those `kept_files` that an older one there held.

    Raises `ConfigError` when `destination` holds what is no part of a model.
    """
    destination = destination.absolute()
    recover(destination)
    if destination.is_dir():
        for path in sorted(destination.iterdir()):
            if not path.is_file() or not _may_be_replaced(path.name):
                raise ConfigError(
                    f"{destination} holds {path.name}, no part of a model; choose a new or an empty directory"
                )
    with new_directory(destination) as temporary:
        for name in kept_files:
            if (destination / name).is_file():
                shutil.copy2(destination / name, temporary)
        yield temporary


def storage_dtype(model: AfmoeForCausalLM) -> torch.dtype:
    """The dtype that stands for the model: its embedding's. Router and norms may be kept wider."""
    return model.model.embed_tokens.weight.dtype


def _canonical_state(model: AfmoeForCausalLM) -> dict[str, Tensor]:
    """The model's tensors under their canonical names, tied ones once."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state[HEAD]
    return {key: tensor.detach() for key, tensor in state.items()}


def _specs(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.empty_like(tensor, device="meta") for key, tensor in state.items()}


def _check_keys(
    reader: TensorReader, found: Mapping[str, Tensor], model: AfmoeForCausalLM, layout: str
) -> set[str]:
    """Compare the files' keys and shapes with those that the model has in `layout`.

    Returns the canonical keys that no file holds and that are zero then: the selection biases of a model
    without any.
    """
    expected = convert(_canonical_state(model), "canonical", layout)
    names: dict[str, str] = {}
    for key in found:
        if is_runtime_state(key) or (key == HEAD and HEAD not in expected):
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


@torch.no_grad()
def _fill(
    model: AfmoeForCausalLM, reader: TensorReader, found: Mapping[str, Tensor], layout: str, absent: set[str]
) -> None:
    state = _canonical_state(model)
    for key in absent:
        state[key].zero_()
    keys: dict[int | None, list[str]] = {}
    for key in found:
        keys.setdefault(layer_of(key), []).append(key)
    top = reader.read(key for key in keys.pop(None, []) if not is_runtime_state(key))
    for layer, layer_keys in keys.items():
        assert layer is not None
        for key, tensor in convert_layer(reader.read(layer_keys), layer, layout, "canonical").items():
            state[key].copy_(tensor)
    if HEAD in top and HEAD not in state and not torch.equal(top.pop(HEAD), top[EMBEDDING]):
        raise ConfigError(
            f"{reader.file_of(HEAD)}: tie_word_embeddings is true, but {HEAD} is not equal to {EMBEDDING}"
        )
    for key, tensor in top.items():
        state[key].copy_(tensor)


def _generation_fields(config: AfmoeConfig) -> dict[str, Any]:
    """What transformers derives from a model's config and writes beside it."""
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "_from_model_config": True,
        **{name: value for name, value in ids.items() if value is not None},
        "output_attentions": False,
        "output_hidden_states": False,
        "transformers_version": version("transformers"),
        "use_cache": config.use_cache,
    }


def _may_be_replaced(name: str) -> bool:
    is_shard = name.startswith("model-") and name.endswith(".safetensors")
    return is_shard or name in _OUR_FILES | DOCUMENTS | TOKENIZER_FILES
