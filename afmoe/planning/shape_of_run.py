"""The model's shape of a run, from small files: no weights are read, no tokenizer is loaded."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from afmoe.checkpoint.hub import resolve_config, resolve_tokenizer
from afmoe.config import AfmoeConfig, RunConfig
from afmoe.errors import ConfigError
from afmoe.model_shape import model_shape

_TOKENIZER_FILE = "tokenizer.json"


def planned_shape(run: RunConfig) -> AfmoeConfig:
    """As the run would have it. Of a hub name only configs and tokenizer files are fetched."""
    directory = None
    if run.model.pretrained is not None:
        directory = resolve_config(run.model.pretrained, run.model.revision)
    num_tokens = tokenizer_length(_tokenizer_directory(run, directory))
    if directory is None:
        return model_shape(run, num_tokens, {})
    from afmoe.checkpoint.config_file import read_config

    stored = model_shape(run, num_tokens, {}, read_config(directory), directory)
    # what tokenizer.resize=true makes of it
    return dataclasses.replace(stored, vocab_size=max(stored.vocab_size, num_tokens))


def tokenizer_length(directory: Any) -> int:
    """Tokens in a directory's `tokenizer.json`: `len` of the tokenizer that transformers would make of it."""
    path = directory / _TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(
            f"{directory} holds no {_TOKENIZER_FILE}; which tokens an assistant wrote needs one"
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    # a list of (token, score) in unigram models
    tokens = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    return len(tokens | {added["content"] for added in content.get("added_tokens", [])})


def _tokenizer_directory(run: RunConfig, pretrained: Path | None) -> Any:
    if run.tokenizer.path is not None:
        return resolve_tokenizer(run.tokenizer.path)
    if pretrained is not None:
        return pretrained
    return files("afmoe.data") / "assets" / "byte_tokenizer"
