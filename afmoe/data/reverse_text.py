"""`data=reverse_text`: reverse a short piece of English, character by character.

The text is prose of the Python documentation, shipped with the package. Whole topics are held out, and no
held-out string occurs in training, so `val/reverse_exact` measures reversing and not remembering.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files

from afmoe.data.options import DataConfig
from afmoe.data.rows import Row
from afmoe.errors import ConfigError
from afmoe.registry import register

TEXT_FILE = "pydoc_topics.txt"
# one topic in eight, by a hash of its name: the same topics whatever the seed
HELD_OUT_SHARE = 8
MAX_DRAWS_PER_ROW = 100


@register("data", "reverse_text")
class ReverseText:
    exact_match_metric = "val/reverse_exact"

    @dataclass(kw_only=True)
    class Config(DataConfig):
        sequence_length: int = 256
        batch_size: int = 8
        min_length: int = 3
        """Characters of the shortest piece."""
        max_length: int = 10
        """Characters of the longest piece."""
        num_train_rows: int = 16384
        num_validation_rows: int = 256
        system: str = ""
        """A system message for every row; empty: none, since its tokens cost time."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 1 <= self.min_length <= self.max_length:
                raise ConfigError(
                    f"data.min_length must lie in [1, max_length={self.max_length}], got {self.min_length}"
                )
            if self.num_train_rows < 1:
                raise ConfigError(f"data.num_train_rows must be at least 1, got {self.num_train_rows}")
            if self.num_validation_rows < 0:
                raise ConfigError(
                    f"data.num_validation_rows must be at least 0, got {self.num_validation_rows}"
                )

    def __init__(self, config: Config, *, seed: int) -> None:
        self.config, self.seed = config, seed

    @property
    def description(self) -> str:
        config = self.config
        return (
            f"reverse_text: {config.num_train_rows:,} pieces of {config.min_length}-{config.max_length} "
            f"characters of the Python documentation (embedded), {config.num_validation_rows:,} held out"
        )

    def train_rows(self) -> Iterator[Row]:
        held_out = {piece for piece, _ in self._validation_pieces()}
        pieces = self._draw(is_held_out=False, seed=f"train {self.seed}")
        for _ in range(self.config.num_train_rows):
            yield self._row(*_next_outside(held_out, pieces, self.config.num_train_rows))

    def validation_rows(self) -> Iterator[Row]:
        for piece, line in self._validation_pieces():
            yield self._row(piece, line)

    def _validation_pieces(self) -> list[tuple[str, int]]:
        """Distinct pieces of held-out topics, the same for every seed, so that runs are comparable."""
        pieces = self._draw(is_held_out=True, seed="validation")
        chosen: dict[str, int] = {}
        for _ in range(self.config.num_validation_rows):
            piece, line = _next_outside(chosen, pieces, self.config.num_validation_rows)
            chosen[piece] = line
        return list(chosen.items())

    def _draw(self, is_held_out: bool, seed: str) -> Iterator[tuple[str, int]]:
        """Endless pieces that start with a word and end without a blank, each with its line in the text."""
        generator = random.Random(seed)
        starts = [
            (text, line, start)
            for topic, line, text in read_paragraphs()
            if is_held_out_topic(topic) == is_held_out
            for start in range(len(text) - self.config.min_length + 1)
            if start == 0 or text[start - 1] == " "
        ]
        if not starts:
            raise ConfigError(f"no paragraph has data.min_length={self.config.min_length} characters")
        while True:
            text, line, start = starts[int(generator.random() * len(starts))]
            span = self.config.max_length - self.config.min_length + 1
            piece = text[start : start + self.config.min_length + int(generator.random() * span)]
            if not piece.endswith(" ") and len(piece) >= self.config.min_length:
                yield piece, line

    def _row(self, piece: str, line: int) -> Row:
        messages = [{"role": "system", "content": self.config.system}] if self.config.system else []
        messages += [{"role": "user", "content": piece}, {"role": "assistant", "content": piece[::-1]}]
        return Row(messages, None, f"{TEXT_FILE}:{line}")


def read_paragraphs() -> list[tuple[str, int, str]]:
    """Topic, line number and text of every paragraph of the embedded text."""
    lines = files("afmoe.data").joinpath("assets", TEXT_FILE).read_text(encoding="utf-8").splitlines()
    paragraphs, topic = [], ""
    for number, line in enumerate(lines, start=1):
        if line.startswith("# "):
            topic = line[2:]
        else:
            paragraphs.append((topic, number, line))
    return paragraphs


def is_held_out_topic(topic: str) -> bool:
    return blake2b(topic.encode(), digest_size=2).digest()[0] % HELD_OUT_SHARE == 0


def _next_outside(
    excluded: dict[str, int] | set[str], pieces: Iterator[tuple[str, int]], num_wanted: int
) -> tuple[str, int]:
    for _ in range(MAX_DRAWS_PER_ROW):
        piece, line = next(pieces)
        if piece not in excluded:
            return piece, line
    raise ConfigError(
        f"the embedded text has too few different pieces for {num_wanted:,} rows; "
        "lower data.num_validation_rows or raise data.max_length"
    )
