"""`moe/dispatch=local`: every expert lives in this process, so dispatch is a sort and combine its inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.dispatch import Dispatched, refuse_several_ranks
from afmoe.moe.dispatch.copies import Copies
from afmoe.moe.grouped_mm import RowSource
from afmoe.registry import register


@register("moe/dispatch", "local")
class LocalDispatcher:
    """Sort by expert, without communication."""

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, num_experts: int, process_group: Any = None) -> None:
        if process_group is not None:
            refuse_several_ranks(process_group.size())
        self.num_experts = num_experts

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware) -> str | None:
        return None

    def plan(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None) -> Copies:
        return Copies.of(expert_ids_TK, token_mask_T, self.num_experts)

    def dispatch(self, tokens_TD: Tensor, plan: Copies, weights_TK: Tensor | None = None) -> Dispatched:
        return Dispatched(
            rows_RD=plan.gather(tokens_TD, weights_TK),
            offsets_L=plan.ends_E.to(torch.int32),
            state=plan,
            # only read: their gradient is that of the rows
            source=RowSource(tokens_TD.detach(), plan.token_of_row_N) if weights_TK is None else None,
        )

    def combine(self, rows_RD: Tensor, weights_TK: Tensor | None, state: Copies) -> Tensor:
        return state.sum(rows_RD, weights_TK)
