"""Where a checkpoint lies: a directory, or a hub name that is fetched. Imports no torch, and the hub only
for one.

Fetched are configs, tokenizers and safetensors, never code or pickles.
"""

from __future__ import annotations

from pathlib import Path

from afmoe.errors import ConfigError

_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors"]


def resolve_tokenizer(name_or_directory: str) -> Path:
    """The directory of `tokenizer.path`, as `resolve_pretrained` finds it, without weights."""
    return _resolve("tokenizer.path", name_or_directory, None, _TOKENIZER_PATTERNS)


def resolve_pretrained(name_or_directory: str, revision: str | None = None) -> Path:
    """The directory of `model.pretrained`. A hub name is downloaded, or taken from the cache when offline.

    `HF_HUB_OFFLINE=1` is respected. Raises `ConfigError` for a directory that is not there, and with the
    hub's reason when it does not give what was asked for.
    """
    if revision is not None and Path(name_or_directory).expanduser().is_dir():
        raise ConfigError(
            f"model.revision={revision} is for hub names, model.pretrained={name_or_directory} is a directory"
        )
    return _resolve("model.pretrained", name_or_directory, revision, _PATTERNS)


def resolve_config(name_or_directory: str, revision: str | None = None) -> Path:
    """The directory of `model.pretrained` with its config and tokenizer; weights are not fetched."""
    return _resolve("model.pretrained", name_or_directory, revision, _TOKENIZER_PATTERNS)


def _resolve(key: str, name_or_directory: str, revision: str | None, patterns: list[str]) -> Path:
    directory = Path(name_or_directory).expanduser()
    if directory.is_dir():
        return directory
    looks_like_path = name_or_directory.startswith(("/", ".", "~")) or name_or_directory.count("/") != 1
    if looks_like_path or directory.exists():
        raise ConfigError(
            f"{key}={name_or_directory}: no such directory; give one, or a hub name like "
            "arcee-ai/Trinity-Mini"
        )
    return _fetch(key, name_or_directory, revision, patterns)


def _fetch(key: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"{key}={name}{at} is no directory here and not in the hub's cache, and "
                "HF_HUB_OFFLINE is set; unset it, or fetch it first"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{key}={name}{at} could not be fetched from the hub: {reason}") from error
