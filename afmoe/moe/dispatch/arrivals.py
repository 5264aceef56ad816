"""Tokens that arrive at a rank once, whatever the number of its experts that they are for.

DeepEP sends a token to a rank once and says for which of the rank's experts. Here each arrived token is
spread over the rows of those experts, and the experts' answers are summed again, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_TOKENS = 1 << 24
"""Of all ranks together: positions travel as fp32, which is exact up to here."""


def positions(num_tokens: int, rank: int, num_ranks: int, device: torch.device) -> Tensor:
    """The place of each of this rank's tokens among those of all ranks, fp32, exact."""
    assert num_tokens * num_ranks <= MAX_TOKENS
    first = rank * (MAX_TOKENS // num_ranks)
    return torch.arange(first, first + num_tokens, device=device, dtype=torch.float32)


@dataclass(frozen=True)
class Arrivals:
    """Which rows the arrived tokens are spread over: by expert, and by position within an expert."""

    copy_of_row_R: Tensor
    """Copy (arrived token * K + k) that lies in each row."""
    token_of_row_R: Tensor
    rows_by_token_R: Tensor
    """The rows of the first token that arrived, then those of the second, and so on."""
    num_rows_A: Tensor
    """int64: rows of each arrived token."""
    ends_L: Tensor
    """int64: the row at which each local expert ends."""

    @classmethod
    def of(
        cls, expert_ids_AK: Tensor, positions_A: Tensor, num_rows: int, num_local_experts: int
    ) -> Arrivals:
        """`expert_ids_AK`: local experts, -1 where a copy is for another rank; `num_rows` are not."""
        num_copies = expert_ids_AK.shape[1]
        is_here_AK = expert_ids_AK >= 0
        expert_ids_AK = torch.where(is_here_AK, expert_ids_AK, num_local_experts)
        # in order of expert, then of position, in one sort
        keys_N = (expert_ids_AK * MAX_TOKENS + positions_A.long()[:, None]).flatten()
        sorted_keys_N, order_N = keys_N.sort(stable=True)
        copy_of_row_R = order_N[:num_rows]
        borders_L = torch.arange(1, num_local_experts + 1, device=keys_N.device) * MAX_TOKENS
        return cls(
            copy_of_row_R=copy_of_row_R,
            token_of_row_R=copy_of_row_R // num_copies,
            rows_by_token_R=copy_of_row_R.argsort(),
            num_rows_A=is_here_AK.sum(1),
            ends_L=torch.searchsorted(sorted_keys_N, borders_L),
        )

    def spread(self, tokens_AD: Tensor, weights_AK: Tensor | None) -> Tensor:
        """The rows_RD, multiplied by their weights if those are given: in fp32, rounded once."""
        rows_RD = _Spread.apply(tokens_AD, self)
        return rows_RD if weights_AK is None else self._weighted(rows_RD, weights_AK).to(rows_RD.dtype)

    def sum(self, rows_RD: Tensor, weights_AK: Tensor | None) -> Tensor:
        """Each arrived token's sum over its rows, weighted if weights are given: in fp32, rounded once."""
        weighted_RD = rows_RD if weights_AK is None else self._weighted(rows_RD, weights_AK)
        return _Sum.apply(weighted_RD, self).to(rows_RD.dtype)

    def _weighted(self, rows_RD: Tensor, weights_AK: Tensor) -> Tensor:
        dtype = torch.promote_types(rows_RD.dtype, torch.float32)
        return rows_RD.to(dtype) * weights_AK.flatten().index_select(0, self.copy_of_row_R)[:, None]


def _sum_rows(rows_RD: Tensor, arrivals: Arrivals) -> Tensor:
    rows_RD = rows_RD.index_select(0, arrivals.rows_by_token_R)
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    # `unsafe` leaves out a check that would wait for the GPU
    sums_AD = torch.segment_reduce(
        rows_RD.to(dtype), "sum", lengths=arrivals.num_rows_A, axis=0, unsafe=True, initial=0
    )
    return sums_AD.to(rows_RD.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_AD: Tensor, arrivals: Arrivals) -> Tensor:
        ctx.arrivals = arrivals
        return tokens_AD.index_select(0, arrivals.token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_rows(grad_RD, ctx.arrivals), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, arrivals: Arrivals) -> Tensor:
        ctx.arrivals = arrivals
        return _sum_rows(rows_RD, arrivals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_AD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_AD.index_select(0, ctx.arrivals.token_of_row_R), None
