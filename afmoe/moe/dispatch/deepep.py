"""`moe/dispatch=deepep`: experts shared by ranks, tokens moved by the kernels of DeepEP.

https://github.com/deepseek-ai/DeepEP, `deep_ep.Buffer` with its kernels for training: over NVLink within a
node, over RDMA and NVLink between nodes. A token goes to a rank once, however many of the rank's experts it
is for. **No GPU has run this plugin.** It was written against the library's documentation and sources; its
tests run it over a stand-in for the buffer (tests/dispatch/deepep_stand_in.py).

Numbers: rows are bf16, as the library moves nothing else; each rank sums its part of a token's answers in
fp32 and rounds it to bf16, the library sums the ranks' parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.moe.dispatch import Dispatched
from afmoe.moe.dispatch.arrivals import MAX_TOKENS, Arrivals, positions
from afmoe.moe.dispatch.deepep_link import Collect, Link, Send, chunk_borders
from afmoe.moe.grouped_mm import product_dtype
from afmoe.registry import register


@register("moe/dispatch", "deepep")
class DeepEpDispatcher:
    """Chunks of tokens through the library's buffer, which is made at the first dispatch.

    The host waits for the GPU once a chunk, inside the library, for the number of tokens that arrive.
    """

    leaves_graph = True

    @dataclass(kw_only=True)
    class Config:
        num_sms: int = 20
        """Streaming multiprocessors that the library's kernels take; even."""
        token_chunk_size: int | None = None
        """Tokens that a rank sends at once; None: all of a layer."""

        def __post_init__(self) -> None:
            if self.num_sms < 2 or self.num_sms % 2:
                raise ValueError(f"moe.dispatch.num_sms must be even and at least 2, got {self.num_sms}")
            if self.token_chunk_size is not None and self.token_chunk_size < 1:
                raise ValueError(
                    f"moe.dispatch.token_chunk_size must be at least 1, got {self.token_chunk_size}"
                )

    def __init__(self, config: Config, *, num_experts: int, process_group: Any) -> None:
        if num_experts % process_group.size():
            raise ConfigError(
                f"num_experts={num_experts} cannot be shared evenly by {process_group.size()} ranks"
            )
        self.config = config
        self.num_experts = num_experts
        self.group = process_group
        self._buffer: Any = None
        self._hidden_bytes = 0

    @classmethod
    def why_not(cls, config: Config, *, hardware: Hardware, precision: str) -> str | None:
        lacking = [
            text
            for text, is_there in (
                ("CUDA GPUs of sm_80 or newer", (hardware.capability or (0, 0)) >= (8, 0)),
                ("the package deep_ep (https://github.com/deepseek-ai/DeepEP)", hardware.has_deep_ep),
                ("trainer.precision=bf16-mixed or bf16-true", precision.startswith("bf16")),
            )
            if not is_there
        ]
        if not lacking:
            return None
        return (
            f"moe/dispatch=deepep needs {' and '.join(lacking)}, this is {hardware.architecture} with "
            f"precision {precision}; use moe/dispatch=all_to_all"
        )

    def agree(self, num_tokens: int, device: torch.device) -> int:
        """The number of chunks: what the rank with most tokens needs. Waits for the GPU."""
        if num_tokens * self.group.size() > MAX_TOKENS:
            raise ConfigError(
                f"moe/dispatch=deepep takes at most {MAX_TOKENS // self.group.size()} tokens a rank and "
                f"micro-batch with {self.group.size()} expert ranks, got {num_tokens}; lower data.batch_size"
            )
        size = self.config.token_chunk_size
        if size is None:
            return 1
        num_chunks = torch.tensor(max(1, -(-num_tokens // size)), device=device)
        dist.all_reduce(num_chunks, dist.ReduceOp.MAX, group=self.group)
        return int(num_chunks)

    def plan(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None, agreed: int | None = None) -> _Plan:
        if agreed is None:
            agreed = self.agree(expert_ids_TK.shape[0], expert_ids_TK.device)
        buckets_TK = expert_ids_TK
        if token_mask_T is not None:
            buckets_TK = expert_ids_TK.masked_fill(~token_mask_T[:, None], self.num_experts)
            expert_ids_TK = expert_ids_TK.masked_fill(~token_mask_T[:, None], -1)
        buckets_N = buckets_TK.flatten()
        counts = buckets_N.new_zeros(self.num_experts + 1).scatter_add_(
            0, buckets_N, torch.ones_like(buckets_N)
        )
        return _Plan(expert_ids_TK, counts[:-1], token_mask_T, agreed)

    def dispatch(
        self, tokens_TD: Tensor, weights_TK: Tensor, plan: _Plan, *, score_before_experts: bool = False
    ) -> Dispatched:
        tokens_TD = tokens_TD.to(product_dtype(tokens_TD))
        num_tokens, group = tokens_TD.shape[0], self.group
        chunks = chunk_borders(num_tokens, plan.num_chunks, self.config.token_chunk_size)
        link = Link(self._open(tokens_TD), chunks, self.num_experts)
        # one more copy, for no expert: its weight says where the token stands among those of all ranks
        tags_T1 = positions(num_tokens, group.rank(), group.size(), tokens_TD.device)[:, None]
        no_expert_T1 = torch.full_like(plan.expert_ids_TK[:, :1], -1)
        tokens_AD, tagged_AK, expert_ids_AK = Send.apply(
            tokens_TD,
            torch.cat([weights_TK.float(), tags_T1], 1),
            torch.cat([plan.expert_ids_TK, no_expert_T1], 1),
            link,
        )
        arrivals = Arrivals.of(
            expert_ids_AK, tagged_AK[:, -1], link.num_rows, self.num_experts // group.size()
        )
        before_AK, after_AK = (tagged_AK, None) if score_before_experts else (None, tagged_AK)
        return Dispatched(
            rows_RD=arrivals.spread(tokens_AD, before_AK),
            offsets_L=arrivals.ends_L.to(torch.int32),
            state=_State(link, arrivals, after_AK, plan.token_mask_T),
        )

    def combine(self, rows_RD: Tensor, state: _State) -> Tensor:
        answers_AD = state.arrivals.sum(rows_RD, state.weights_AK)
        tokens_TD = Collect.apply(answers_AD, state.link)
        if state.token_mask_T is not None:
            tokens_TD = tokens_TD.masked_fill(~state.token_mask_T[:, None], 0.0)
        return tokens_TD

    def _open(self, tokens_TD: Tensor) -> Any:
        """The library's buffer, made anew where tokens are larger than those it was made for."""
        # the sizes are those of bf16 rows at least
        hidden_bytes = tokens_TD.shape[1] * max(tokens_TD.element_size(), 2)
        if hidden_bytes > self._hidden_bytes:
            self._buffer = open_buffer(self.group, hidden_bytes, self.config.num_sms)
            self._hidden_bytes = hidden_bytes
        return self._buffer


@dataclass(frozen=True)
class _Plan:
    """Where this rank's tokens go; -1 for those that go nowhere."""

    expert_ids_TK: Tensor
    counts_E: Tensor
    token_mask_T: Tensor | None
    num_chunks: int


@dataclass(frozen=True)
class _State:
    """What arrived, and the way back."""

    link: Link
    arrivals: Arrivals
    weights_AK: Tensor | None
    """Of the sum. None: they are on the rows already."""
    token_mask_T: Tensor | None


def open_buffer(group: Any, hidden_bytes: int, num_sms: int) -> Any:
    """A `deep_ep.Buffer` of the ranks of `group`, for tokens of `hidden_bytes`. All ranks together."""
    import deep_ep  # pyright: ignore[reportMissingImports]

    deep_ep.Buffer.set_num_sms(num_sms)
    configs = (
        deep_ep.Buffer.get_dispatch_config(group.size()),
        deep_ep.Buffer.get_combine_config(group.size()),
    )
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    return deep_ep.Buffer(group, nvlink_bytes, rdma_bytes)
