"""Loading a tokenizer: a directory, a hub name, or the byte tokenizer that ships with the package."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from afmoe.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(path: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, or the embedded one: 256 bytes (id = byte), control tokens, a ChatML template.

    Code that comes with a tokenizer is never run. Raises `ConfigError` when there is none, or it has no stop
    token.
    """
    if path is None:
        with as_file(files("afmoe.data") / "assets" / "byte_tokenizer") as directory:
            return _load(str(directory))
    directory = Path(path).expanduser()
    if directory.is_dir() and not has_tokenizer(directory):
        raise ConfigError(f"no tokenizer in {directory}: it holds none of {', '.join(TOKENIZER_FILES)}")
    return _load(str(directory) if directory.is_dir() else path)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def _load(path: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"no tokenizer at {path}: {first_line}") from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer at {path} has no tokenizer.json; which tokens an assistant wrote needs one"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer at {path} names no stop token; set `eos_token` in its tokenizer_config.json"
        )
    return tokenizer
