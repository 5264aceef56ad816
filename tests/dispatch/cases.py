"""One MoE block whose experts are shared by ranks, against `local` on the tokens of all ranks together.

Each rank computes both: the union is the same on all, drawn from a seed. Runs inside the ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afmoe import AfmoeConfig
from afmoe.hardware import Hardware
from afmoe.layers import FeedForward
from afmoe.moe.block import MoeBlock
from afmoe.moe.compute import ExpertShape
from afmoe.moe.dispatch import make_dispatcher
from afmoe.registry import build, configure

E, K, D, F = 8, 3, 64, 48
CPU = Hardware(device_type="cpu")

# tokens of each rank (two or four), and where tokens go
TOKENS = {
    "uneven": (37, 20, 5, 11),
    "zero_receive": (37, 20, 5, 11),
    "zero_send": (37, 0, 5, 0),
    "one_token": (0, 1, 0, 0),
    "all_masked": (9, 12, 3, 4),
}
COMPUTES: dict[str, dict[str, Any]] = {
    "native": {"name": "native"},
    "fp8": {"name": "fp8"},
    "fp8_ue8m0": {"name": "fp8", "scales": "ue8m0"},
}
DISPATCHERS: dict[str, dict[str, Any]] = {
    "native": {"name": "all_to_all"},
    "bf16": {"name": "all_to_all", "transport": "bf16"},
    "mxfp8": {"name": "all_to_all", "transport": "mxfp8"},
    "deepep": {"name": "deepep"},
    # 37 tokens are three chunks, the last of eleven; 20 tokens are two, then an empty one
    "deepep_chunked": {"name": "deepep", "token_chunk_size": 13},
}


@dataclass(frozen=True)
class Case:
    compute: str
    score_before_experts: bool
    shared: bool
    tokens: str

    @property
    def config(self) -> AfmoeConfig:
        return AfmoeConfig(
            hidden_size=D,
            num_experts=E,
            num_experts_per_tok=K,
            moe_intermediate_size=F,
            route_scale=2.0,
            score_before_experts=self.score_before_experts,
        )

    def block(self, dispatcher: Any) -> MoeBlock:
        """With every expert, the same weights each time."""
        torch.manual_seed(0)
        shape = ExpertShape(num_experts=E, hidden_size=D, intermediate_size=F, activation="silu")
        compute = build(configure("moe/compute", COMPUTES[self.compute]), shape=shape, hardware=CPU)
        shared_expert = FeedForward(D, F, "silu") if self.shared else None
        block = MoeBlock(self.config, 0, compute=compute, dispatcher=dispatcher, shared_expert=shared_expert)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.2)
        if self.tokens == "zero_receive":
            # every token goes to the first half of the experts
            block.router.selection_bias[4:] = -1e4
        return block

    def inputs(self) -> list[tuple[Tensor, Tensor | None]]:
        """Tokens [1, T, D] and mask [T] of each rank."""
        torch.manual_seed(1)
        counts = TOKENS[self.tokens][: dist.get_world_size()]
        hidden = [torch.randn(1, count, D) for count in counts]
        masks: list[Tensor | None] = [None] * len(counts)
        if self.tokens == "uneven":
            masks = [torch.rand(count) > 0.2 for count in counts]
        if self.tokens == "all_masked":
            masks = [torch.full((count,), index != 1) for index, count in enumerate(counts)]
        return list(zip(hidden, masks, strict=True))


CASES = [
    Case(compute, before, shared, tokens)
    for compute, before, shared, tokens in itertools.product(
        ("native", "fp8"), (False, True), (False, True), TOKENS
    )
]


def my_rank() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def shard(block: MoeBlock) -> None:
    """Keep this rank's experts."""
    rank, num_ranks = my_rank()
    for name, weight in list(block.experts.named_parameters()):
        setattr(block.experts, name, nn.Parameter(weight.detach().chunk(num_ranks)[rank].clone()))


def shared_block(case: Case, dispatch: dict[str, Any]) -> MoeBlock:
    block = case.block(make_dispatcher(dispatch, num_experts=E, process_group=dist.group.WORLD))
    shard(block)
    return block


@cache
def on_the_union(case: Case) -> dict[str, Tensor]:
    """Output and gradients of `local` on the tokens of all ranks."""
    block = case.block(make_dispatcher("local", num_experts=E))
    hidden, masks = zip(*case.inputs(), strict=True)
    mask_T = None if masks[0] is None else torch.cat(masks)  # pyright: ignore[reportArgumentType]
    union_BSD = torch.cat(hidden, 1).requires_grad_()
    output_BSD, _ = block(union_BSD, mask_T)
    output_BSD.backward(gradient_of(union_BSD))
    return results(block, union_BSD, output_BSD)


def gradient_of(union_BSD: Tensor) -> Tensor:
    return torch.randn(union_BSD.shape, generator=torch.Generator().manual_seed(2))


def on_my_rank(case: Case, block: MoeBlock) -> dict[str, Tensor]:
    """The same of a block that shares its experts, for this rank's tokens and experts; router and shared
    expert summed over the ranks, as data parallelism does.
    """
    rank, _ = my_rank()
    inputs = case.inputs()
    hidden_BSD, mask_T = inputs[rank]
    hidden_BSD.requires_grad_()
    first = sum(TOKENS[case.tokens][:rank])
    union_BSD = torch.cat([hidden for hidden, _ in inputs], 1)
    output_BSD, _ = block(hidden_BSD, mask_T)
    output_BSD.backward(gradient_of(union_BSD)[:, first : first + hidden_BSD.shape[1]])
    found = results(block, hidden_BSD, output_BSD)
    for name in found:
        if name.startswith(("router", "shared_expert")):
            dist.all_reduce(found[name])
    return found


def results(block: MoeBlock, hidden_BSD: Tensor, output_BSD: Tensor) -> dict[str, Tensor]:
    assert hidden_BSD.grad is not None
    found = {"output": output_BSD.detach(), "input": hidden_BSD.grad}
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def my_part(case: Case, name: str, whole: Tensor) -> Tensor:
    rank, num_ranks = my_rank()
    if name in ("output", "input"):
        first = sum(TOKENS[case.tokens][:rank])
        return whole[:, first : first + TOKENS[case.tokens][rank]]
    return whole.chunk(num_ranks)[rank] if name.startswith("experts") else whole


def largest_deviations(case: Case, found: dict[str, Tensor]) -> dict[str, float]:
    """Per tensor, the largest difference over the largest entry of the union's."""
    deviations = {}
    for name, whole in on_the_union(case).items():
        difference = (found[name] - my_part(case, name, whole)).abs()
        largest = difference.max().item() if difference.numel() else 0.0
        deviations[name] = largest / max(whole.abs().max().item(), 1e-30)
    return deviations


def square_norms(case: Case, found: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Per tensor, the squares of the difference and of the union's, this rank's part of them."""
    norms = {}
    for name, whole in on_the_union(case).items():
        part = my_part(case, name, whole)
        norms[name] = ((found[name] - part).square().sum().item(), part.square().sum().item())
    return norms
