"""What the model is: its config, its tokenizer, and where its weights are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from afmoe.checkpoint.config_file import read_config
from afmoe.checkpoint.hub import resolve_pretrained, resolve_tokenizer
from afmoe.config import AfmoeConfig, RunConfig
from afmoe.data.tokenizer import has_tokenizer, load_tokenizer
from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.model import AfmoeForCausalLM
from afmoe.model_shape import model_shape


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """All that is known of a model before it exists."""

    config: AfmoeConfig
    tokenizer: PreTrainedTokenizerBase
    directory: Path | None
    """Of its trained weights; None: they are drawn anew."""


def find_model(config: RunConfig) -> ModelSource:
    """Find trained weights and tokenizer, and let them and the settings agree on a shape (`model_shape`)."""
    directory = None
    if config.model.pretrained is not None:
        directory = resolve_pretrained(config.model.pretrained, config.model.revision)
    tokenizer = _tokenizer(config.tokenizer.path, directory)
    special_ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    stored = None if directory is None else read_config(directory)
    shape = model_shape(config, len(tokenizer), special_ids, stored, directory)
    return ModelSource(shape, tokenizer, directory)


def chosen_plugins(config: RunConfig, hardware: Hardware) -> dict[str, Any]:
    """The arguments of `AfmoeForCausalLM` that say how it computes."""
    return {
        "attention": config.attention,
        "compute": config.moe.compute,
        "dispatch": config.moe.dispatch,
        "hardware": hardware,
    }


def meta_model(config: RunConfig, source: ModelSource, hardware: Hardware) -> AfmoeForCausalLM:
    """The model without memory, to count, to check, and to be filled."""
    with torch.device("meta"):
        return AfmoeForCausalLM(source.config, **chosen_plugins(config, hardware))


def _tokenizer(path: str | None, pretrained: Path | None) -> PreTrainedTokenizerBase:
    """The chosen one, else the one beside the trained weights, else the embedded byte tokenizer."""
    if path is not None:
        return load_tokenizer(str(resolve_tokenizer(path)))
    if pretrained is None:
        return load_tokenizer(None)
    if not has_tokenizer(pretrained):
        raise ConfigError(f"model.pretrained={pretrained} holds no tokenizer; set tokenizer.path")
    return load_tokenizer(str(pretrained))
