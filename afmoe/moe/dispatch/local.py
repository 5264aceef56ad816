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

    leaves_graph = False

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, num_experts: int, process_group: Any = None) -> None:
        if process_group is not None:
            refuse_several_ranks(process_group.size())
        self.num_experts = num_experts

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, precision: str) -> str | None:
        return None

    def agree(self, num_tokens: int, device: torch.device) -> None:
        return None

    def plan(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None, agreed: None = None) -> Copies:
        return Copies.of(expert_ids_TK, token_mask_T, self.num_experts)

    def dispatch(
        self, tokens_TD: Tensor, weights_TK: Tensor, plan: Copies, *, score_before_experts: bool = False
    ) -> Dispatched:
        before_TK, after_TK = (weights_TK, None) if score_before_experts else (None, weights_TK)
        return Dispatched(
            rows_RD=plan.gather(tokens_TD, before_TK),
            offsets_L=plan.ends_E.to(torch.int32),
            state=_State(plan, after_TK),
            # only read: their gradient is that of the rows
            source=None if score_before_experts else RowSource(tokens_TD.detach(), plan.token_of_row_N),
        )

    def combine(self, rows_RD: Tensor, state: _State) -> Tensor:
        return state.copies.sum(rows_RD, state.weights_TK)


@dataclass(frozen=True)
class _State:
    copies: Copies
    weights_TK: Tensor | None
    """Of the sum. None: they are on the rows already."""
