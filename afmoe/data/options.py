"""Options of every source of the group `data`, and of those that read files. Needs no torch."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afmoe.errors import ConfigError


@dataclass(kw_only=True)
class DataConfig:
    sequence_length: int = 2048
    """Tokens of a pack; a row with more is bad."""
    batch_size: int = 1
    """Packs per rank and micro-batch."""
    packing: bool = True
    """Several rows a pack. False: one row each, padded to the longest of its micro-batch."""
    on_bad_row: str = "drop"
    """`drop` leaves a bad row out and counts it, `error` stops at the first."""
    max_bad_fraction: float = 0.1
    """More bad rows than this fraction of a split stop the run."""
    num_workers: int = 0
    """Processes that prepare batches; 0 does it in the training process."""
    chat_template: str | None = None
    """A Jinja file instead of the tokenizer's own chat template."""
    allow_batch_change: bool = False
    """Resume also when `batch_size` x accumulation x ranks differs from the checkpoint's."""

    def __post_init__(self) -> None:
        for name, bound in (("sequence_length", 2), ("batch_size", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if value < bound:
                raise ConfigError(f"data.{name} must be at least {bound}, got {value}")
        if self.on_bad_row not in ("drop", "error"):
            raise ConfigError(f"data.on_bad_row must be drop or error, got {self.on_bad_row}")
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise ConfigError(f"data.max_bad_fraction must lie in [0, 1], got {self.max_bad_fraction}")
        if self.chat_template is not None and not Path(self.chat_template).expanduser().is_file():
            raise ConfigError(f"data.chat_template={self.chat_template} is no file")

    def check_files(self) -> None:
        """Raise `ConfigError` where a file must be given and is not; a source without files needs none."""


@dataclass(kw_only=True)
class FileDataConfig(DataConfig):
    train_files: Any = None
    """A path or a list of paths; `*` and `**` match."""
    validation_files: Any = None
    """The same for held-out rows; absent: `validation_fraction` of the training files' rows."""
    validation_fraction: float = 0.05
    """Share of rows held out where `validation_files` is absent, by a hash of the row; 0 holds out none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ConfigError(f"data.validation_fraction must lie in [0, 1), got {self.validation_fraction}")
        for name in ("train_files", "validation_files"):
            value = getattr(self, name)
            if value is not None:
                matching_files(f"data.{name}", value)

    def check_files(self) -> None:
        self.train_paths()

    def train_paths(self) -> list[Path]:
        if not self.train_files:
            raise ConfigError("data.train_files is not given; write data.train_files=[FILE, ...]")
        return matching_files("data.train_files", self.train_files)

    def validation_paths(self) -> list[Path]:
        return matching_files("data.validation_files", self.validation_files or [])


def matching_files(key: str, value: Any) -> list[Path]:
    """The files that a path, a pattern or a list of them names, in the order given, each once."""
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{key} must be a path or a list of paths, got {value!r}")
    paths: dict[Path, None] = {}
    for pattern in patterns:
        expanded = Path(pattern).expanduser()
        if expanded.is_file():
            matches = [expanded]
        else:
            matches = [
                path for path in map(Path, sorted(glob.glob(str(expanded), recursive=True))) if path.is_file()
            ]
        if not matches:
            raise ConfigError(f"{key}: no file {pattern} (looked from {Path.cwd()})")
        paths.update(dict.fromkeys(matches))
    return list(paths)
