"""Which files make a model directory, and how one replaces another: whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from afmoe.checkpoint.atomic import new_directory, recover
from afmoe.checkpoint.config_file import CONFIG
from afmoe.checkpoint.marker import CONVERSION, PRIME_MARKER
from afmoe.checkpoint.tensor_file import INDEX, WEIGHTS
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError

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
_WRITTEN_FILES = {CONFIG, GENERATION_CONFIG, WEIGHTS, INDEX, CONVERSION, PRIME_MARKER}


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


def generation_fields(config: AfmoeConfig) -> dict[str, Any]:
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


def is_weights_file(name: str) -> bool:
    return name in (WEIGHTS, INDEX) or (name.startswith("model-") and name.endswith(".safetensors"))


def _may_be_replaced(name: str) -> bool:
    return is_weights_file(name) or name in _WRITTEN_FILES | DOCUMENTS | TOKENIZER_FILES
