"""Packs as tensors: the batches of one rank, and a loader over them that can start inside an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from afmoe.data.plan import PackPlan
from afmoe.data.token_rows import TokenRows

Batch = dict[str, Any]
CountFlops = Callable[[np.ndarray, int], int]
"""From the lengths of documents and the number of labels to the operations of training on them."""
IGNORED_LABEL = -100
NO_DOCUMENT = -1


@dataclass(frozen=True)
class StepLayout:
    """How the packs of one optimizer step are dealt to micro-batches and ranks.

    Consecutive packs make a micro-batch, consecutive micro-batches go to the ranks in turn. So the packs of a
    step, and of each micro-batch, are the same for every accumulation and world size with the same product.
    """

    batch_size: int
    accumulate: int
    world_size: int

    @property
    def packs_per_step(self) -> int:
        return self.batch_size * self.accumulate * self.world_size


class PackBatches(Dataset[Batch]):
    """The micro-batches of one rank in an epoch, by their number as the trainer counts them.

    An epoch that is continued at `packs_consumed` begins with `batches_done`: the micro-batches that these
    packs make in whole optimizer steps of this layout. Batches before that are counted and cannot be read.
    """

    def __init__(
        self,
        rows: TokenRows,
        plan: PackPlan,
        layout: StepLayout,
        *,
        rank: int,
        pad_token_id: int,
        pack_length: int | None,
        packs_consumed: int = 0,
        counts_whole_step: bool = True,
        count_flops: CountFlops | None = None,
    ) -> None:
        self.rows, self.plan, self.layout, self.rank = rows, plan, layout, rank
        self.pad_token_id, self.pack_length = pad_token_id, pack_length
        self.packs_consumed = packs_consumed
        self.counts_whole_step = counts_whole_step
        self.count_flops = count_flops
        self.batches_done = batches_of(packs_consumed, layout)
        self._lengths, self._label_counts = rows.lengths, rows.label_counts

    def __len__(self) -> int:
        return self.batches_done + batches_of(max(0, len(self.plan) - self.packs_consumed), self.layout)

    def __getitem__(self, index: int) -> Batch:
        assert self.batches_done <= index < len(self)
        layout = self.layout
        number = index - self.batches_done
        first = self.packs_consumed + (number * layout.world_size + self.rank) * layout.batch_size
        packs = [self.plan.pack(pack) for pack in range(first, first + layout.batch_size)]
        batch = make_batch(self.rows, packs, self.pad_token_id, self.pack_length)
        batch["num_own_label_tokens"] = int(self._label_counts[np.concatenate(packs)].sum())
        counted = packs
        if self.counts_whole_step:
            step = self.packs_consumed + number // layout.accumulate * layout.packs_per_step
            counted = [self.plan.pack(pack) for pack in range(step, step + layout.packs_per_step)]
        row_numbers = np.concatenate(counted)
        batch["num_label_tokens"] = int(self._label_counts[row_numbers].sum())
        batch["num_real_tokens"] = int(self._lengths[row_numbers].sum())
        if self.count_flops is not None:
            batch["num_flops"] = self.count_flops(self._lengths[row_numbers], batch["num_label_tokens"])
        return batch


def batches_of(num_packs: int, layout: StepLayout) -> int:
    """Micro-batches that a rank needs for so many packs, in whole optimizer steps."""
    return -(-num_packs // layout.packs_per_step) * layout.accumulate


def step_tokens(
    plan: PackPlan, lengths: np.ndarray, layout: StepLayout, packs_consumed: int = 0
) -> np.ndarray:
    """Real tokens of each optimizer step that is left of an epoch, over all ranks and micro-batches."""
    tokens_before = np.concatenate([[0], np.cumsum(lengths[plan.rows], dtype=np.int64)])[plan.offsets]
    borders = np.arange(packs_consumed, len(plan), layout.packs_per_step)
    ends = np.minimum(borders + layout.packs_per_step, len(plan))
    return tokens_before[ends] - tokens_before[borders]


def make_batch(
    rows: TokenRows, packs: Sequence[np.ndarray], pad_token_id: int, pack_length: int | None
) -> Batch:
    """Packs as [B, S] tensors; S is `pack_length`, or the longest pack's.

    Positions restart at 0 with every row; what is left of a pack is padding, a document of its own. Keys:
    `input_ids`, `position_ids`, `labels` (-100: none), `document_ids` (the row's number in its split, -1:
    padding), all int64, and `attention_mask` (bool, true on real tokens).
    """
    if pack_length is None:
        pack_length = max(1, *(int(rows.lengths[pack].sum()) for pack in packs))
    shape = (len(packs), pack_length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
    document_ids = np.full(shape, NO_DOCUMENT, dtype=np.int64)
    for index, pack in enumerate(packs):
        end = 0
        for row in pack:
            source = slice(rows.offsets[row], rows.offsets[row + 1])
            start, end = end, end + int(source.stop - source.start)
            ids = rows.input_ids[source]
            input_ids[index, start:end] = ids
            position_ids[index, start:end] = np.arange(end - start)
            labels[index, start:end] = np.where(rows.is_label[source], ids, IGNORED_LABEL)
            document_ids[index, start:end] = row
        position_ids[index, end:] = np.arange(pack_length - end)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "attention_mask": torch.from_numpy(document_ids != NO_DOCUMENT),
        "labels": torch.from_numpy(labels),
        "document_ids": torch.from_numpy(document_ids),
    }


class PackLoader:
    """Iterates over the batches that are left of an epoch; its length is that of the whole epoch.

    So Lightning wants it on resuming: it adds the batches done before to those that it fetches, and ends the
    epoch at the length. Not a `DataLoader` itself: Lightning would swap its sampler.
    """

    def __init__(
        self,
        batches: PackBatches,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        before_fetch: Callable[[], None] | None = None,
    ) -> None:
        """`before_fetch` is called when a batch is asked for."""
        self.batches, self.num_workers, self.pin_memory = batches, num_workers, pin_memory
        self.before_fetch = before_fetch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        order = range(self.batches.batches_done, len(self.batches))
        loader = DataLoader(
            self.batches,
            batch_size=None,
            sampler=order,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        return iter(loader) if self.before_fetch is None else _announced(loader, self.before_fetch)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the data module knows where the run stands. Lightning trusts a resume only with this."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


def _announced(batches: Iterable[Batch], before_fetch: Callable[[], None]) -> Iterator[Batch]:
    iterator = iter(batches)
    while True:
        before_fetch()
        batch = next(iterator, None)
        if batch is None:
            return
        yield batch
