"""How evenly the routers load their experts: counting, and the metrics of the counts.

Nothing is counted unless asked for: `with count_routing(model): model(batch)` counts that forward and nothing
else, so that neither validation nor generation nor the second forward of activation checkpointing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from afmoe.moe.router import Routing


class RoutingStatistics:
    """Sums over the real tokens that one MoE block has routed since `reset_counts`, on the model's device."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.counts_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        """Routed copies per expert, exact."""
        self.confidence_sum = torch.zeros((), dtype=torch.float32, device=device)
        """Sum over tokens of (scores of the chosen experts / of all experts), before bias and scale."""
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, routing: Routing, counts_E: Tensor, token_mask_T: Tensor | None) -> None:
        """Count one routing. `counts_E` as the dispatcher counted it: real tokens of this rank."""
        scores_TE = routing.scores_TE.float()
        confidence_T = scores_TE.gather(-1, routing.expert_ids_TK).sum(-1) / scores_TE.sum(-1).clamp(
            min=1e-20
        )
        self.counts_E += counts_E
        if token_mask_T is None:
            self.confidence_sum += confidence_T.sum()
            self.num_tokens += confidence_T.shape[0]
        else:
            self.confidence_sum += confidence_T.masked_fill(~token_mask_T, 0.0).sum()
            self.num_tokens += token_mask_T.sum()

    @property
    def confidence(self) -> Tensor:
        """Mean over tokens, the metric `moe/router_confidence`; 0 where nothing was counted."""
        return self.confidence_sum / self.num_tokens.clamp(min=1)


class CountedModule(nn.Module):
    """A module that routes, and counts while `count_routing` asks for it."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.is_counting = False
        self.statistics: RoutingStatistics | None = None
        """What was counted here; None before the first time."""

    def count(self, routing: Routing, counts_E: Tensor, token_mask_T: Tensor | None) -> None:
        """Add one routing to `statistics`, if it is asked for."""
        if not self.is_counting:
            return
        self.statistics_on(counts_E.device).add(routing, counts_E, token_mask_T)

    def statistics_on(self, device: torch.device) -> RoutingStatistics:
        """`statistics`, made anew where there are none on that device."""
        if self.statistics is None or self.statistics.counts_E.device != device:
            self.statistics = RoutingStatistics(self.num_experts, device)
        return self.statistics


def counted_modules(model: nn.Module) -> Iterator[CountedModule]:
    """The modules of `model` that count, in the order of its layers, whatever it is wrapped in.

    They are looked for in every step, and `model.modules()` would visit the parts of each as well.
    """
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, CountedModule):
            yield module
        else:
            waiting.extend(reversed(list(module.children())))


@contextmanager
def count_routing(model: nn.Module) -> Iterator[None]:
    """Count what the forward inside routes, on top of what `block.statistics` of each MoE block holds."""
    counted = list(counted_modules(model))
    for module in counted:
        module.is_counting = True
    try:
        yield
    finally:
        for module in counted:
            module.is_counting = False


def reset_counts(model: nn.Module) -> None:
    """Start counting anew, in every block of `model`."""
    totals = [
        total
        for module in counted_modules(model)
        if (statistics := module.statistics) is not None
        for total in (statistics.counts_E, statistics.confidence_sum, statistics.num_tokens)
    ]
    if totals:
        torch._foreach_zero_(totals)  # pyright: ignore[reportPrivateImportUsage]


def max_violation(counts_E: Tensor) -> Tensor:
    """Overload of the busiest expert: 0 is perfect balance, 1 is twice its share ("MaxVio", arXiv
    2408.15664).

    Works on leading axes too; 0 where nothing was routed.
    """
    counts_E = counts_E.double()
    mean = counts_E.mean(-1)
    return torch.where(mean > 0, counts_E.amax(-1) / mean.clamp(min=1e-20) - 1, 0.0).float()


def load_entropy(counts_E: Tensor) -> Tensor:
    """Entropy of the load over log E: 1 is perfect balance, 0 is one expert with all tokens."""
    counts_E = counts_E.double()
    shares_E = counts_E / counts_E.sum(-1, keepdim=True).clamp(min=1)
    num_experts = max(counts_E.shape[-1], 2)
    return (torch.special.entr(shares_E).sum(-1) / torch.tensor(num_experts).double().log()).float()


def dead_experts(counts_E: Tensor) -> Tensor:
    """Experts that no token went to, int64."""
    return (counts_E == 0).sum(-1)
