"""Muon under ZeRO 1 and 2, which give the optimizer flat parts of the matrices that it has to see whole.

The ranks that share a group of matrices put weights, gradients and momenta together, each does the whole step
and keeps its part. That costs the time and the memory of the group's step on every rank, for as long as the
step lasts; experts whose ranks are all expert ranks are whole already and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from afmoe.optim.muon import MuonWithAdamW, Piece


class ShardedMuon(MuonWithAdamW):
    """Takes the place of a fresh `MuonWithAdamW`; `zero` is set once the engine is made."""

    zero: Any = None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups)
        self._whole: list[tuple[Tensor, Tensor, int]] = []
        """This rank's part, the whole, and where the part begins in it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for part, whole, start in self._whole:
            part.copy_(whole.narrow(0, start, part.numel()))
        self._whole.clear()
        return loss

    def pieces(self, parameter: Tensor, group: dict[str, Any]) -> Iterator[Piece]:
        """The matrices of a group; `parameter` is this rank's part of them, one after the other."""
        zero = self.zero
        index = next(
            index for index, flat in enumerate(zero.single_partition_of_fp32_groups) if flat is parameter
        )
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        ranks = zero.real_dp_process_group[index]
        assert parameter.grad is not None
        weight = self._gather(parameter.detach(), ranks, is_changed=True)
        gradient = self._gather(parameter.grad, ranks, is_changed=False)
        momentum = self._gather(state["momentum_buffer"], ranks, is_changed=True)
        places = zip(zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index], strict=True)
        for matrix, start in places:
            size, shape = matrix.numel(), matrix.shape
            whole = [flat.narrow(0, start, size).view(shape) for flat in (weight, gradient, momentum)]
            yield from self.split(whole, group)

    def _gather(self, part: Tensor, ranks: Any, *, is_changed: bool) -> Tensor:
        size = dist.get_world_size(ranks)
        if size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group=ranks)
        whole = torch.cat(parts)
        if is_changed:
            self._whole.append((part, whole, dist.get_rank(ranks) * part.numel()))
        return whole
