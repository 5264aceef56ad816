"""Each expert's rows as host integers, and neighbouring experts as runs that are computed together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Segment = tuple[int, int, int]
"""(expert, first row, row after the last)"""


@dataclass(frozen=True)
class ExpertRun:
    """Neighbouring experts and their rows, counted from the run's first."""

    rows: slice
    """Where the run lies among the rows of all experts."""
    experts: list[Segment]

    @property
    def busy(self) -> list[Segment]:
        """Those that have rows."""
        return [segment for segment in self.experts if segment[1] < segment[2]]

    @cached_property
    def table_N3(self) -> Tensor:
        """`experts` in int64, on the CPU."""
        return torch.tensor(self.experts, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Segments:
    """Of all experts. On a CUDA device making this waits for the GPU."""

    experts: list[Segment]
    end: int
    """Row at which the last expert ends and the padding begins."""

    @classmethod
    def of(cls, offsets_L: Tensor, *, num_experts: int, num_rows: int) -> Segments:
        """Raises `ValueError` for offsets that are not those of so many experts and rows.

        Beyond a tensor's end torch would cut rows off, and compiled kernels would write.
        """
        borders = [0, *offsets_L.tolist()]
        if len(borders) != num_experts + 1 or borders[-1] > num_rows or borders != sorted(borders):
            raise ValueError(
                f"the offsets must ascend from 0 to at most {num_rows} rows, one for each of {num_experts} "
                f"experts, got {borders[1:]}"
            )
        experts = [(e, start, end) for e, (start, end) in enumerate(itertools.pairwise(borders))]
        return cls(experts, borders[-1])

    def runs(self, max_rows: int) -> Iterator[ExpertRun]:
        """All experts, in runs of about `max_rows` rows: one that has more is a run of its own."""
        run: list[Segment] = []
        first = 0
        for e, start, end in self.experts:
            if run and end - first > max_rows:
                yield ExpertRun(slice(first, start), run)
                run, first = [], start
            run.append((e, start - first, end - first))
        yield ExpertRun(slice(first, self.end), run)
