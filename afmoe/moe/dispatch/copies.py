"""A token's K routed copies: sorted by expert, gathered into rows, summed again.

Both directions are gathers, forward and backward: the inverse permutation says where a token's copies went.
That replaces the scatter-add that autograd would use for a gather's gradient, and fixes every sum's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 19
"""Values of a backward chunk on a CPU (2 MiB in fp32)."""


@dataclass(frozen=True)
class Copies:
    """Where each copy of a batch's tokens lies once the copies are sorted by expert.

    The copies of masked tokens lie behind those of every expert: they are padding.
    """

    order_N: Tensor
    """Copy (token * K + k) that lies in each row."""
    token_of_row_N: Tensor
    copy_to_row_TK: Tensor
    """Inverse of `order_N`."""
    ends_E: Tensor
    """int64: the row at which each expert ends."""
    token_mask_T: Tensor | None

    @classmethod
    def of(cls, expert_ids_TK: Tensor, token_mask_T: Tensor | None, num_experts: int) -> Copies:
        num_copies = expert_ids_TK.shape[1]
        if token_mask_T is not None:
            expert_ids_TK = expert_ids_TK.masked_fill(~token_mask_T[:, None], num_experts)
        order_N, ends_E = sort_by_expert(expert_ids_TK, num_experts)
        copy_to_row_TK = invert_permutation(order_N).view(-1, num_copies)
        return cls(order_N, order_N // num_copies, copy_to_row_TK, ends_E, token_mask_T)

    @property
    def counts_E(self) -> Tensor:
        """int64: copies of real tokens for each expert."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1))

    def gather(self, tokens_TD: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        """The rows_ND, multiplied by their weights if those are given: in fp32 at least, rounded once."""
        rows_ND = _GatherRows.apply(tokens_TD, self.token_of_row_N, self.copy_to_row_TK)
        if weights_TK is None:
            return rows_ND
        weights_N = permute_rows(weights_TK.flatten(), self.order_N, self.copy_to_row_TK.flatten())
        dtype = torch.promote_types(rows_ND.dtype, torch.float32)
        return (rows_ND.to(dtype) * weights_N[:, None]).to(rows_ND.dtype)

    def sum(self, rows_ND: Tensor, weights_TK: Tensor | None) -> Tensor:
        """The tokens_TD: each the sum of its K rows, weighted if `weights_TK` is given; a masked one is 0."""
        if weights_TK is None:
            dtype = torch.promote_types(rows_ND.dtype, torch.float32)
            weights_TK = rows_ND.new_ones(self.copy_to_row_TK.shape, dtype=dtype)
        if self.token_mask_T is not None:
            weights_TK = weights_TK.masked_fill(~self.token_mask_T[:, None], 0.0)
        return _WeightedSum.apply(rows_ND, weights_TK, self.order_N, self.token_of_row_N, self.copy_to_row_TK)


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order the routed copies so that each expert's rows are contiguous, in the order of the tokens.

    Returns `order_N` (copy that goes to each row) and `ends_E` (row at which each expert ends, int64). Ids of
    `num_experts` and above sort last and belong to no expert.
    """
    sorted_ids_N, order_N = expert_ids_TK.flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, device=expert_ids_TK.device)
    return order_N, torch.searchsorted(sorted_ids_N, experts_E, right=True)


def invert_permutation(order_N: Tensor) -> Tensor:
    """`inverse` with `inverse[order[i]] = i`."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


def permute_rows(rows_N: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """rows[order]. The gradient is gathered by the inverse."""
    return _PermuteRows.apply(rows_N, order_N, inverse_N)


def sum_copies(rows_ND: Tensor, copy_to_row_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's sum over its rows, weighted if `weights_TK` is given: in fp32 at least, rounded once."""
    return (sum_by_gather if rows_ND.is_cuda else sum_by_bags)(rows_ND, copy_to_row_TK, weights_TK)


def sum_by_bags(rows_ND: Tensor, copy_to_row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """`sum_copies` without the [T, K, D] tensor of all copies: on a CPU it takes an eighth of the time."""
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    weights_TK = None if weights_TK is None else weights_TK.to(dtype)
    sums_TD = F.embedding_bag(copy_to_row_TK, rows_ND.to(dtype), mode="sum", per_sample_weights=weights_TK)
    return sums_TD.to(rows_ND.dtype)


def sum_by_gather(rows_ND: Tensor, copy_to_row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    copies_TKD = rows_ND[copy_to_row_TK]
    if weights_TK is not None:
        copies_TKD = copies_TKD * weights_TK[:, :, None]
    # a sum of bf16 values accumulates in fp32
    return copies_TKD.sum(1).to(rows_ND.dtype)


class _GatherRows(torch.autograd.Function):
    """rows = tokens[token_of_row]; a token's gradient is the sum over its copies' rows."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, token_of_row_N: Tensor, copy_to_row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(copy_to_row_TK)
        return tokens_TD.index_select(0, token_of_row_N)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_ND: Tensor
    ) -> tuple[Tensor, None, None]:
        (copy_to_row_TK,) = ctx.saved_tensors
        return sum_copies(grad_ND, copy_to_row_TK), None, None


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return rows_N.index_select(0, order_N)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_N: Tensor
    ) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grad_N.index_select(0, inverse_N), None, None


class _WeightedSum(torch.autograd.Function):
    """tokens = sum over k of weights[t, k] * rows[copy_to_row[t, k]], in fp32 at least."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weights_TK: Tensor,
        order_N: Tensor,
        token_of_row_N: Tensor,
        copy_to_row_TK: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK, order_N, token_of_row_N, copy_to_row_TK)
        return sum_copies(rows_ND, copy_to_row_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TD: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows_ND, weights_TK, order_N, token_of_row_N, copy_to_row_TK = ctx.saved_tensors
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        num_rows, size = rows_ND.shape
        grad_rows_ND = torch.empty_like(rows_ND, memory_format=torch.contiguous_format)
        dots_N1 = weights_TK.new_empty(num_rows, 1)
        weight_of_row_N1 = weights_TK.flatten()[order_N][:, None]
        # on a GPU in one go; on a CPU what lies between stays in the cache
        step = max(1, num_rows if rows_ND.is_cuda else CHUNK_ELEMENTS // size)
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            grad = grad_TD.index_select(0, token_of_row_N[part]).to(weights_TK.dtype)
            if needs_weights:
                torch.sum(grad * rows_ND[part], 1, keepdim=True, out=dots_N1[part])
            if needs_rows:
                grad_rows_ND[part] = grad.mul_(weight_of_row_N1[part])
        grad_weights_TK = dots_N1[:, 0][copy_to_row_TK] if needs_weights else None
        return grad_rows_ND if needs_rows else None, grad_weights_TK, None, None, None
