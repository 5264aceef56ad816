"""`moe/dispatch=all_to_all`: experts shared by the ranks of a process group, rows moved by torch.distributed.

Works with any backend that has `all_to_all_single`: NCCL on GPUs, gloo on CPUs. A copy of a token is one row
on the wire, there and back; `afmoe.moe.dispatch.wire` says in which form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.moe.dispatch import Dispatched
from afmoe.moe.dispatch.copies import Copies, invert_permutation, permute_rows
from afmoe.moe.dispatch.exchange import exchange_rows, start_counts, wait_counts
from afmoe.moe.dispatch.wire import TRANSPORTS
from afmoe.registry import register


@register("moe/dispatch", "all_to_all")
class AllToAllDispatcher:
    """Sort by expert, send each rank the rows of its experts, sort what arrives by expert.

    The ranks tell each other their counts while the shared expert computes; then the host waits for them
    once, because it must know how many rows go where.
    """

    leaves_graph = False

    @dataclass(kw_only=True)
    class Config:
        transport: str = "native"
        """`native`, `bf16` or `mxfp8`: the form of a row on the wire, forward and backward."""

        def __post_init__(self) -> None:
            if self.transport not in TRANSPORTS:
                raise ValueError(
                    f"moe.dispatch.transport must be one of {', '.join(TRANSPORTS)}, got {self.transport}"
                )

    def __init__(self, config: Config, *, num_experts: int, process_group: Any) -> None:
        if num_experts % process_group.size():
            raise ConfigError(
                f"num_experts={num_experts} cannot be shared evenly by {process_group.size()} ranks"
            )
        self.transport = config.transport
        self.num_experts = num_experts
        # a group is reached by its name from within an operator
        self.group_name, self.num_ranks = process_group.group_name, process_group.size()

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, precision: str) -> str | None:
        return None

    def agree(self, num_tokens: int, device: torch.device) -> None:
        return None

    def plan(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None, agreed: None = None) -> _Plan:
        copies = Copies.of(expert_ids_TK, token_mask_T, self.num_experts)
        counts_E = copies.counts_E
        return _Plan(copies, counts_E, start_counts(counts_E, self.group_name, self.num_ranks))

    def dispatch(
        self, tokens_TD: Tensor, weights_TK: Tensor, plan: _Plan, *, score_before_experts: bool = False
    ) -> Dispatched:
        before_TK, after_TK = (weights_TK, None) if score_before_experts else (None, weights_TK)
        rows_ND = plan.copies.gather(tokens_TD, before_TK)
        arrived_WL = wait_counts(plan.arriving_E, self.num_ranks)
        leaving_WL = plan.counts_E.view_as(arrived_WL)
        # where the host waits
        sizes_2W = torch.stack([leaving_WL.sum(1), arrived_WL.sum(1)]).cpu()
        received_RD = self._exchange(rows_ND, sizes_2W, None)
        row_of_arrival_R = rows_by_expert(arrived_WL, received_RD.shape[0])
        arrival_of_row_R = invert_permutation(row_of_arrival_R)
        return Dispatched(
            rows_RD=permute_rows(received_RD, arrival_of_row_R, row_of_arrival_R),
            offsets_L=arrived_WL.sum(0).cumsum(0).to(torch.int32),
            state=_State(plan.copies, after_TK, sizes_2W, arrival_of_row_R, row_of_arrival_R),
        )

    def combine(self, rows_RD: Tensor, state: _State) -> Tensor:
        answers_RD = permute_rows(rows_RD, state.row_of_arrival_R, state.arrival_of_row_R)
        rows_ND = self._exchange(answers_RD, state.sizes_2W.flip(0), state.copies.order_N.shape[0])
        return state.copies.sum(rows_ND, state.weights_TK)

    def _exchange(self, rows_RD: Tensor, sizes_2W: Tensor, num_rows: int | None) -> Tensor:
        return exchange_rows(rows_RD, sizes_2W, num_rows, self.group_name, self.transport)


@dataclass(frozen=True)
class _Plan:
    """What a rank knows of its own tokens, and the other ranks' counts on their way."""

    copies: Copies
    counts_E: Tensor
    arriving_E: Tensor


@dataclass(frozen=True)
class _State:
    """Where each copy went, and the way back."""

    copies: Copies
    weights_TK: Tensor | None
    """Of the sum. None: they are on the rows already."""
    sizes_2W: Tensor
    """int64, on the CPU: rows sent to each rank, and received from each."""
    arrival_of_row_R: Tensor
    """Of the rows by expert: its place among the rows by source rank."""
    row_of_arrival_R: Tensor


def rows_by_expert(counts_WL: Tensor, num_rows: int) -> Tensor:
    """The place by (expert, source rank) of each row that arrived by (source rank, expert).

    `counts_WL`: rows from each rank for each expert, `num_rows` in all.
    """
    ends_WL = counts_WL.flatten().cumsum(0).view_as(counts_WL)
    ends_LW = counts_WL.t().flatten().cumsum(0).view(counts_WL.shape[1], counts_WL.shape[0])
    # rows of one run keep their order: from where they lie now to where they go it is the same way for all
    shift_WL = (ends_LW.t() - ends_WL).flatten()
    arrivals_R = torch.arange(num_rows, device=counts_WL.device)
    runs_R = torch.searchsorted(ends_WL.flatten(), arrivals_R, right=True)
    return arrivals_R + shift_WL[runs_R]
