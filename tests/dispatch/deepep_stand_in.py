"""A stand-in for `deep_ep.Buffer` on torch.distributed, so that `moe/dispatch=deepep` runs without a GPU.

It has the library's methods as far as the plugin calls them, with its parameters (names, order and defaults
of deep_ep/buffers/legacy.py, checked in test_deepep.py), and refuses what the kernels would refuse. What a
call returns is NaN until its event is waited for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = {torch.bfloat16}
"""What the kernels move; a test that compares in fp32 adds that."""


@dataclass
class Config:
    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """Puts the results in place when it is waited for."""

    pending: ClassVar[int] = 0

    def __init__(self, results: dict[Tensor, Tensor]) -> None:
        self.results = results
        EventOverlap.pending += 1

    def current_stream_wait(self) -> None:
        for target, value in self.results.items():
            target.copy_(value)
        self.results = {}
        EventOverlap.pending -= 1


class Buffer:
    num_sms: int = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.num_ranks = group, group.size()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, None]:
        _refuse(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.dtype == torch.int64
        experts_each = num_experts // self.num_ranks
        ranks = torch.where(topk_idx >= 0, topk_idx // experts_each, -1)
        is_in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.num_ranks)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in_rank.sum(0).int(), None, per_expert.int(), is_in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert async_finish
        assert (expert_alignment, num_worst_tokens) == (1, 0)
        _refuse(config, previous_event, allocate_on_comm_stream)
        _check_tokens(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            pending = self._exchange(x, handle)
            return *pending[:1], None, None, None, None, pending[1]
        assert num_tokens_per_rank is not None
        assert num_tokens_per_rdma_rank is None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        assert topk_idx.shape == topk_weights.shape
        per_rank = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(per_rank, num_tokens_per_rank, group=self.group)
        handle = (is_token_in_rank, num_tokens_per_rank.tolist(), per_rank.tolist())
        tokens, tokens_event = self._exchange(x, handle)
        ids, ids_event = self._exchange(topk_idx, handle)
        weights, weights_event = self._exchange(topk_weights, handle)
        # ids and counts are as the receiving rank sees them
        experts_each = num_tokens_per_expert.shape[0] // self.num_ranks
        first = self.group.rank() * experts_each
        arrived = ids_event.results[ids]
        is_here = (arrived >= first) & (arrived < first + experts_each)
        ids_event.results[ids] = torch.where(is_here, arrived - first, -1)
        weights_event.results[weights].masked_fill_(~is_here & (arrived >= 0), 0.0)
        counts = torch.bincount(ids_event.results[ids][is_here], minlength=experts_each).tolist()
        event = _merged(tokens_event, ids_event, weights_event)
        return tokens, ids, weights, counts, handle, event

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert async_finish
        _refuse(bias, config, previous_event, allocate_on_comm_stream)
        assert x.dtype in DTYPES
        assert x.is_contiguous()
        tokens, event = self._collect(x, handle)
        if topk_weights is None:
            return tokens, None, event
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        weights, weights_event = self._collect(topk_weights, handle)
        return tokens, weights, _merged(event, weights_event)

    def _exchange(self, x: Tensor, handle: Any) -> tuple[Tensor, EventOverlap]:
        """Each token to the ranks that it is for: by rank, in order of the tokens."""
        is_in_rank, sent, received = handle
        leaving = torch.cat([x[is_in_rank[:, rank]] for rank in range(self.num_ranks)])
        arrived = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(arrived, leaving, received, sent, group=self.group)
        return _pending(arrived)

    def _collect(self, x: Tensor, handle: Any) -> tuple[Tensor, EventOverlap]:
        """The sum over the ranks that a token went to, in fp32."""
        is_in_rank, sent, received = handle
        assert x.shape[0] == sum(received)
        back = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(back, x, sent, received, group=self.group)
        total = torch.zeros(is_in_rank.shape[0], x.shape[1])
        for rank, part in enumerate(back.split(sent)):
            total[is_in_rank[:, rank]] += part.float()
        return _pending(total.to(x.dtype))


def _refuse(*arguments: Any) -> None:
    """What the plugin does not use is not imitated."""
    assert not any(arguments)


def _check_tokens(x: Tensor) -> None:
    assert x.dim() == 2
    assert x.shape[0] > 0
    assert x.is_contiguous()
    assert x.dtype in DTYPES
    assert x.shape[1] * x.element_size() % 16 == 0


def _pending(value: Tensor) -> tuple[Tensor, EventOverlap]:
    target = torch.full_like(value, float("nan") if value.is_floating_point() else -(2**40))
    return target, EventOverlap({target: value})


def _merged(first: EventOverlap, *others: EventOverlap) -> EventOverlap:
    for other in others:
        first.results |= other.results
        EventOverlap.pending -= 1
    return first


def install() -> None:
    """Let `import deep_ep` find the stand-in, in this process."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["deep_ep"] = module
