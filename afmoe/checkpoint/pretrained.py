"""Whole models from and to directories of `config.json` and safetensors, in any layout, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afmoe.checkpoint.config_file import CONFIG, config_fields, read_config, write_json
from afmoe.checkpoint.layouts import convert, convert_layer, layer_of, layers_of, stored_specs
from afmoe.checkpoint.memory import check_memory
from afmoe.checkpoint.model_directory import (
    DOCUMENTS,
    GENERATION_CONFIG,
    HEAD,
    MAX_SHARD_SIZE,
    TOKENIZER_FILES,
    generation_fields,
    replaced_model_directory,
)
from afmoe.checkpoint.model_files import ModelFiles
from afmoe.checkpoint.shapes import canonical_specs
from afmoe.checkpoint.tensor_file import TensorWriter
from afmoe.hardware import Hardware
from afmoe.model import AfmoeForCausalLM
from afmoe.moe.block import held_experts, hold_experts


def load_pretrained(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: Any = "sdpa",
    compute: Any = "native",
    dispatch: Any = "local",
    hardware: Hardware | None = None,
    expert_range: range | None = None,
) -> AfmoeForCausalLM:
    """The model in `directory`, in any known layout, stored in `dtype` (`selection_bias` in fp32) on the CPU.

    `expert_range`: the consecutive experts of each layer that this process holds; the others' weights stay
    on the disk. None: all.

    Built without memory, checked against the files' tables, then filled in place layer by layer. Raises
    `ConfigError` naming file and key when anything is missing, left over or misshapen, `MachineError`
    before reading when the model does not fit in memory.
    """
    directory = Path(directory)
    config = read_config(directory)
    with torch.device("meta"):
        model = AfmoeForCausalLM(config, attention, compute, dispatch, hardware)
    model.to(dtype)
    hold_experts(model, expert_range)
    state = _canonical_state(model)
    sizes: dict[int | None, int] = {}
    for key, tensor in state.items():
        sizes[layer_of(key)] = sizes.get(layer_of(key), 0) + tensor.nbytes
    # the largest layer once more: its experts are stacked before they are copied
    largest = max(sizes[layer] for layer in layers_of(state))
    check_memory(f"loading {directory} in {str(dtype).removeprefix('torch.')}", sum(sizes.values()) + largest)

    model.to_empty(device="cpu")
    load_weights(model, directory)
    return model


@torch.no_grad()
def load_weights(model: AfmoeForCausalLM, directory: str | Path) -> None:
    """Fill `model` in place, layer by layer, from a directory whose config fits it.

    Of the experts only the bytes of those that it holds are read. Raises `ConfigError` as `load_pretrained`
    does, before anything is changed.
    """
    experts = held_experts(model)
    files = ModelFiles(Path(directory), canonical_specs(model.config))
    state = _canonical_state(model)
    for key in files.top_keys:
        state[key].copy_(files.read_top(key))
    for layer in files.layers:
        for key, tensor in files.read_layer(layer, expert_range=experts).items():
            state[key].copy_(tensor)
    model.on_weights_updated()


def save_pretrained(
    model: AfmoeForCausalLM,
    directory: str | Path,
    layout: str = "hf",
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write the model's config and weights in `layout`, whole or not at all; shards hold `max_shard_size`
    bytes.

    `dtype`: what the weights are stored in, None: as the model has them; a selection bias is fp32 in any
    case. A tokenizer that lies in `directory` stays. Raises `ConfigError` when transformers cannot express
    the model in layout `hf`, when a value is too large for `dtype`, or when the directory holds what is no
    part of a model.
    """
    fields = config_fields(model.config, layout, dtype or storage_dtype(model))
    with replaced_model_directory(Path(directory), DOCUMENTS | TOKENIZER_FILES) as temporary:
        write_model(ModelTensors(model), temporary, layout, max_shard_size, dtype)
        write_json(temporary / CONFIG, fields)
        write_json(temporary / GENERATION_CONFIG, generation_fields(model.config))


class ModelTensors:
    """A model's tensors under their canonical names, tied ones once: shapes first, then part by part."""

    def __init__(self, model: AfmoeForCausalLM) -> None:
        self.state = _canonical_state(model)

    @property
    def specs(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype, on the meta device."""
        return {key: torch.empty_like(tensor, device="meta") for key, tensor in self.state.items()}

    def read(self, layer: int | None) -> dict[str, Tensor]:
        """The tensors of one layer; None: those of no layer."""
        return {key: tensor for key, tensor in self.state.items() if layer_of(key) == layer}


def write_model(
    tensors: ModelTensors,
    directory: Path,
    layout: str,
    max_shard_size: int = MAX_SHARD_SIZE,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights only, into an existing directory, layer by layer."""
    canonical = tensors.specs
    specs = stored_specs(convert(canonical, "canonical", layout), dtype)
    with TensorWriter(directory, specs, max_shard_size) as writer:
        writer.write(tensors.read(None))
        for layer in layers_of(canonical):
            writer.write(convert_layer(tensors.read(layer), layer, "canonical", layout))


def storage_dtype(model: AfmoeForCausalLM) -> torch.dtype:
    """The dtype that stands for the model: its embedding's. Router and norms may be kept wider."""
    return model.model.embed_tokens.weight.dtype


def _canonical_state(model: AfmoeForCausalLM) -> dict[str, Tensor]:
    """The model's tensors under their canonical names, tied ones once."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state[HEAD]
    return {key: tensor.detach() for key, tensor in state.items()}
