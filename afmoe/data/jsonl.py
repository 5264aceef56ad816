"""`data=jsonl`: conversations in JSON Lines files, read line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from afmoe.data.messages import parse_row, read_conversation
from afmoe.data.options import FileDataConfig
from afmoe.data.rows import BadRow, Row, RowError
from afmoe.registry import register


@register("data", "jsonl")
class Jsonl:
    exact_match_metric = None

    @dataclass(kw_only=True)
    class Config(FileDataConfig):
        pass

    def __init__(self, config: Config, *, seed: int) -> None:
        """`seed` is every source's; which rows are held out here depends on the rows alone."""
        self.train_paths, self.validation_paths = config.train_paths(), config.validation_paths()
        self.validation_fraction = 0.0 if self.validation_paths else config.validation_fraction

    @property
    def description(self) -> str:
        text = f"jsonl: {_sizes(self.train_paths)}"
        if self.validation_paths:
            return f"{text}, held out: {_sizes(self.validation_paths)}"
        return f"{text}, {self.validation_fraction:.1%} of the rows held out"

    def train_rows(self) -> Iterator[Row | BadRow]:
        return (row for row in read_rows(self.train_paths) if not self._is_held_out(row))

    def validation_rows(self) -> Iterator[Row | BadRow]:
        if self.validation_paths:
            return read_rows(self.validation_paths)
        if not self.validation_fraction:
            return iter(())
        return (row for row in read_rows(self.train_paths) if self._is_held_out(row))

    def _is_held_out(self, row: Row | BadRow) -> bool:
        # bad rows are reported once, with the training rows
        return isinstance(row, Row) and _uniform_hash(row) < self.validation_fraction


def read_rows(paths: list[Path]) -> Iterator[Row | BadRow]:
    """Every row of the files in their order; empty lines are skipped."""
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                origin = f"{path}:{number}"
                try:
                    yield Row(*read_conversation(parse_row(line)), origin)
                except RowError as error:
                    yield BadRow(error.reason, origin, error.detail)


def _uniform_hash(row: Row) -> float:
    """A number in [0, 1) that depends on the conversation alone, not on its file, line or JSON spelling."""
    text = json.dumps([row.messages, row.tools], sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) / 2**56


def _sizes(paths: list[Path]) -> str:
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    return f"{paths[0].name if len(paths) == 1 else f'{len(paths)} files'} ({megabytes:,.1f} MB)"
