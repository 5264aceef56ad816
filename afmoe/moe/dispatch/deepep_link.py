"""One layer's way through DeepEP: tokens out and answers back, chunk by chunk, and their gradients.

The library's buffer (`deep_ep.Buffer`, its kernels for training) is handed in: nothing here imports it. A
dispatch's gradient is a combine and a combine's is a dispatch, both over the handle of the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunk_borders(num_tokens: int, num_chunks: int, chunk_size: int | None) -> list[slice]:
    """The tokens of each chunk; the last ones may be short or empty. `chunk_size` None: one chunk of all."""
    size = num_tokens if chunk_size is None else chunk_size
    assert num_chunks * size >= num_tokens
    return [slice(min(i * size, num_tokens), min((i + 1) * size, num_tokens)) for i in range(num_chunks)]


@dataclass
class Link:
    """What one layer's call must remember between `send` and the last gradient."""

    buffer: Any
    chunks: list[slice]
    num_experts: int
    handles: list[Any] = field(default_factory=list)
    """The library's, one a chunk."""
    num_arrived: list[int] = field(default_factory=list)
    """Tokens, a chunk."""
    num_rows: int = 0
    """Copies that arrived for this rank's experts, over all chunks."""

    def send(
        self, tokens_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What arrives here: tokens, weights, and local experts (-1: for another rank)."""
        arrived, events = [], []
        for chunk in self.chunks:
            tokens, expert_ids, weights = _never_empty(
                tokens_TD[chunk], expert_ids_TK[chunk], weights_TK[chunk]
            )
            per_rank, per_node, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
                expert_ids, self.num_experts
            )
            *parts, rows_per_expert, handle, event = self.buffer.dispatch(
                tokens,
                topk_idx=expert_ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                async_finish=True,
            )
            arrived.append(parts)
            events.append(event)
            self.handles.append(handle)
            self.num_arrived.append(parts[0].shape[0])
            self.num_rows += sum(rows_per_expert)
        _wait(events)
        tokens_AD, expert_ids_AK, weights_AK = (_joined(list(part)) for part in zip(*arrived, strict=True))
        return tokens_AD, weights_AK, expert_ids_AK

    def send_again(self, tokens_TD: Tensor) -> Tensor:
        """Other tokens to where `send` sent the first ones."""
        arrived, events = [], []
        for chunk, handle in zip(self.chunks, self.handles, strict=True):
            (tokens,) = _never_empty(tokens_TD[chunk])
            tokens_AD, _, _, _, _, event = self.buffer.dispatch(tokens, handle=handle, async_finish=True)
            arrived.append(tokens_AD)
            events.append(event)
        _wait(events)
        return _joined(arrived)

    def collect(self, answers_AD: Tensor, weights_AK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The way back of what arrived: each token's sum over the ranks that it went to, and its weights'."""
        answers = answers_AD.split(self.num_arrived)
        weights = [None] * len(answers) if weights_AK is None else weights_AK.split(self.num_arrived)
        tokens_TD, weights_TK, events = [], [], []
        for chunk, handle, part, part_weights in zip(
            self.chunks, self.handles, answers, weights, strict=True
        ):
            back, back_weights, event = self.buffer.combine(
                part.contiguous(),
                handle,
                topk_weights=None if part_weights is None else part_weights.contiguous(),
                async_finish=True,
            )
            count = chunk.stop - chunk.start
            tokens_TD.append(back[:count])
            weights_TK.append(None if back_weights is None else back_weights[:count])
            events.append(event)
        _wait(events)
        return _joined(tokens_TD), None if weights_AK is None else _joined(weights_TK)


class Send(torch.autograd.Function):
    """`Link.send`, differentiable in tokens and weights."""

    @staticmethod
    def forward(
        ctx: Any, tokens_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, link: Link
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.link = link
        tokens_AD, weights_AK, expert_ids_AK = link.send(tokens_TD, weights_TK, expert_ids_TK)
        ctx.mark_non_differentiable(expert_ids_AK)
        return tokens_AD, weights_AK, expert_ids_AK

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_AD: Tensor, grad_weights_AK: Tensor, _: Any
    ) -> tuple[Tensor, Tensor | None, None, None]:
        return *ctx.link.collect(grad_AD, grad_weights_AK), None, None


class Collect(torch.autograd.Function):
    """`Link.collect` of the answers, differentiable."""

    @staticmethod
    def forward(ctx: Any, answers_AD: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return link.collect(answers_AD)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.link.send_again(grad_TD), None


def _never_empty(tokens: Tensor, expert_ids: Tensor | None = None, *others: Tensor) -> list[Tensor]:
    """A chunk without tokens gets one that is for no expert: every rank takes part in every chunk, and no
    kernel of the library sees an empty tensor.
    """
    given = [tokens, *([] if expert_ids is None else [expert_ids]), *others]
    if tokens.shape[0] > 0:
        return [part.contiguous() for part in given]
    padded = [part.new_zeros(1, part.shape[1]) for part in given]
    if expert_ids is not None:
        padded[1].fill_(-1)
    return padded


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _wait(events: list[Any]) -> None:
    """Before anything reads what the library's stream writes."""
    for event in events:
        event.current_stream_wait()
