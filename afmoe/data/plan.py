"""Which rows go into which pack in an epoch: a function of seed, epoch, lengths and pack length, and of
nothing else.

So any rank of any world computes the same plan, and how far a run has come is two numbers: (epoch, packs
consumed).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afmoe.data.packing import pack_best_fit

# packing looks at this many rows of the shuffled order at a time, so that equal lengths do not gather over an
# epoch
WINDOW_ROWS = 1000
# ... or, for short rows, at enough of them for this many packs: one badly filled pack a window then costs
# little
WINDOW_PACKS = 64


@dataclass(frozen=True)
class PackPlan:
    """The packs of an epoch, as row numbers in one flat array."""

    rows: np.ndarray
    offsets: np.ndarray
    """Where each pack begins in `rows`; one entry more than packs."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pack(self, number: int) -> np.ndarray:
        """Row numbers of a pack; past the end an empty one, which fills an epoch's last optimizer step."""
        if number >= len(self):
            return self.rows[:0]
        return self.rows[self.offsets[number] : self.offsets[number + 1]]


def plan_epoch(
    lengths: np.ndarray, *, sequence_length: int, packing: bool, seed: int, epoch: int
) -> PackPlan:
    """The packs of a training epoch: rows shuffled, packed window by window, packs shuffled."""
    generator = np.random.default_rng((seed % 2**64, epoch))
    packs = _pack(generator.permutation(len(lengths)), lengths, sequence_length, packing)
    # best fit leaves the long rows in a window's first packs
    return _flatten([packs[number] for number in generator.permutation(len(packs))])


def plan_in_order(lengths: np.ndarray, *, sequence_length: int, packing: bool) -> PackPlan:
    """The packs of a validation pass, the same every time."""
    return _flatten(_pack(np.arange(len(lengths)), lengths, sequence_length, packing))


def _pack(order: np.ndarray, lengths: np.ndarray, sequence_length: int, packing: bool) -> list[np.ndarray]:
    if not packing:
        return list(order[:, None])
    packs: list[np.ndarray] = []
    start = 0
    tokens_before = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])
    while start < len(order):
        enough_tokens = tokens_before[start] + WINDOW_PACKS * sequence_length
        end = max(start + WINDOW_ROWS, int(np.searchsorted(tokens_before, enough_tokens)))
        window = order[start:end]
        packs += [window[pack] for pack in pack_best_fit(lengths[window].tolist(), sequence_length)]
        start = end
    return packs


def _flatten(packs: list[np.ndarray]) -> PackPlan:
    rows = np.concatenate(packs) if packs else np.zeros(0, dtype=np.int64)
    return PackPlan(rows, np.concatenate([[0], np.cumsum([len(pack) for pack in packs], dtype=np.int64)]))
