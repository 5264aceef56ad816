"""Where a checkpoint lies: a directory, or a hub name that is fetched. Imports no torch, and the hub only
for one.

Fetched are configs, tokenizers and safetensors, never code or pickles.
"""

from __future__ import annotations

from pathlib import Path

from afmoe.errors import ConfigError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def resolve_pretrained(name_or_directory: str, revision: str | None = None) -> Path:
    """The directory of `model.pretrained`. A hub name is downloaded, or taken from the cache when offline.

    `HF_HUB_OFFLINE=1` is respected. Raises `ConfigError` for a directory that is not there, and with the
    hub's reason when it does not give what was asked for.
    """
    directory = Path(name_or_directory).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ConfigError(
                f"model.revision={revision} is for hub names, "
                f"model.pretrained={name_or_directory} is a directory"
            )
        return directory
    looks_like_path = name_or_directory.startswith(("/", ".", "~")) or name_or_directory.count("/") != 1
    if looks_like_path or directory.exists():
        raise ConfigError(
            f"model.pretrained={name_or_directory}: no such directory; give one with config.json and "
            "safetensors, or a hub name like arcee-ai/Trinity-Mini"
        )
    return _fetch(name_or_directory, revision)


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"model.pretrained={name}{at} is no directory here and not in the hub's cache, and "
                "HF_HUB_OFFLINE is set; unset it, or fetch the model first"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"model.pretrained={name}{at} could not be fetched from the hub: {reason}"
        ) from error
