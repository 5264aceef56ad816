"""The tokenised rows of a split, in flat arrays, and how a source's rows become them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from afmoe.data.chat import ChatRenderer
from afmoe.data.options import DataConfig
from afmoe.data.report import SplitReport
from afmoe.data.rows import BadRow, Row

# rows rendered in one call of the chat template
RENDER_ROWS = 256


@dataclass(frozen=True)
class TokenRows:
    """All rows of a split one after the other: a list of lists would take ten times the memory."""

    input_ids: np.ndarray
    """int32."""
    is_label: np.ndarray
    """bool: the assistant wrote the token, and it is not the row's first, which nothing predicts."""
    offsets: np.ndarray
    """int64: where each row begins; one entry more than rows."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def label_counts(self) -> np.ndarray:
        """Trainable tokens of each row."""
        labels_before = np.concatenate([[0], np.cumsum(self.is_label, dtype=np.int64)])
        return np.diff(labels_before[self.offsets])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, labels and borders: equal for equal data, whatever files it came from."""
        digest = hashlib.sha256()
        for part in (self.input_ids, self.is_label, self.offsets):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def tokenize_rows(
    rows: Iterable[Row | BadRow], renderer: ChatRenderer, config: DataConfig, split: str
) -> tuple[TokenRows, SplitReport]:
    """Render a source's rows, the bad ones left out. Raises `ConfigError` where `config` says to stop."""
    report = SplitReport(split)
    ids, labels, lengths = array("i"), array("b"), array("q")
    for result in rendered(rows, renderer, config.sequence_length):
        report.read += 1
        if isinstance(result, BadRow):
            report.drop(result, stop=config.on_bad_row == "error")
            continue
        row_ids, row_labels = result
        ids.extend(row_ids)
        labels.extend(row_labels)
        lengths.append(len(row_ids))
    report.check_bad_fraction(config.max_bad_fraction)
    token_rows = TokenRows(
        np.array(ids, dtype=np.int32),
        np.array(labels, dtype=bool),
        np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]),
    )
    report.used = len(token_rows)
    report.tokens, report.trainable_tokens = len(token_rows.input_ids), int(token_rows.is_label.sum())
    return token_rows, report


def rendered(
    rows: Iterable[Row | BadRow], renderer: ChatRenderer, sequence_length: int
) -> Iterator[tuple[list[int], list[int]] | BadRow]:
    """Ids and labels of each row in the order of `rows`, or what is wrong with it."""
    rows = iter(rows)
    while chunk := list(islice(rows, RENDER_ROWS)):
        good = [row for row in chunk if isinstance(row, Row)]
        results = iter(renderer.render(good))
        for row in chunk:
            result = row if isinstance(row, BadRow) else next(results)
            if isinstance(result, BadRow):
                yield result
                continue
            # nothing predicts a document's first token
            labels = [0, *result.assistant_mask[1:]]
            if len(labels) > sequence_length:
                detail = f"{len(labels)} tokens, data.sequence_length={sequence_length}"
                yield BadRow("too long", row.origin, detail)
            elif not any(labels):
                yield BadRow("no trainable token", row.origin)
            else:
                yield result.input_ids, labels
