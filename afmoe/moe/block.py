"""The mixture-of-experts block: route, dispatch, experts, combine, add shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from afmoe.config import AfmoeConfig
from afmoe.moe.compute import ExpertCompute
from afmoe.moe.dispatch import Dispatcher
from afmoe.moe.experts import Experts
from afmoe.moe.router import Router
from afmoe.moe.statistics import CountedModule, counted_modules
from afmoe.recomputation import part


class MoeBlock(CountedModule):
    """One layer's routed experts and its shared expert, which the layer hands in (None: it has none)."""

    recomputes_experts = False
    """Whether what the experts keep for backward is dropped and computed again there."""

    def __init__(
        self,
        config: AfmoeConfig,
        layer_index: int,
        *,
        compute: ExpertCompute,
        dispatcher: Dispatcher,
        shared_expert: nn.Module | None,
    ) -> None:
        super().__init__(config.num_experts)
        self.layer_index = layer_index
        self.score_before_experts = config.score_before_experts
        self.dispatcher = dispatcher
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, compute)
        self.shared_expert = shared_expert

    def forward(
        self, hidden_BSD: Tensor, token_mask_T: Tensor | None = None, agreed: Any = None
    ) -> tuple[Tensor, Tensor]:
        """The block's output [B, S, D] and the router's logits [B*S, E].

        `token_mask_T` (bool, None: all real): padding goes to no expert and is counted nowhere. `agreed`:
        what the dispatcher's ranks settled for this forward.
        """
        tokens_TD = hidden_BSD.flatten(0, 1)
        routing = self.router(tokens_TD, token_mask_T)
        plan = self.dispatcher.plan(routing.expert_ids_TK, token_mask_T, agreed)
        # before dispatch: ranks that share the experts tell each other their counts meanwhile
        shared_BSD = None if self.shared_expert is None else self._part(self.shared_expert, hidden_BSD)
        dispatched = self.dispatcher.dispatch(
            self.prepare_expert_input(tokens_TD),
            routing.weights_TK,
            plan,
            score_before_experts=self.score_before_experts,
        )
        rows_RD = self._part(self.experts, dispatched.rows_RD, dispatched.offsets_L, dispatched.source)
        routed_TD = self.dispatcher.combine(rows_RD, dispatched.state)
        output_BSD = self.prepare_expert_output(routed_TD).view_as(hidden_BSD)
        if shared_BSD is not None:
            output_BSD = shared_BSD + output_BSD
        self.count(routing, plan.counts_E, token_mask_T)
        return output_BSD, routing.logits_TE

    def _part(self, experts: nn.Module, *inputs: Any) -> Tensor:
        return part(experts, *inputs, is_recomputed=self.recomputes_experts)

    def prepare_expert_input(self, tokens_TD: Tensor) -> Tensor:
        """What the experts see of the tokens. For subclasses whose experts work in another space."""
        return tokens_TD

    def prepare_expert_output(self, tokens_TD: Tensor) -> Tensor:
        """The way back from `prepare_expert_input`."""
        return tokens_TD

    @property
    def compute(self) -> ExpertCompute:
        return self.experts.compute


def moe_blocks(model: nn.Module) -> Iterator[MoeBlock]:
    """The MoE blocks of `model`, in the order of its layers, whatever it is wrapped in."""
    yield from (module for module in counted_modules(model) if isinstance(module, MoeBlock))


def hold_experts(model: nn.Module, experts: range | None) -> None:
    """Give `model`, which lies on the meta device, room for these experts of each layer only; None: all."""
    if experts is not None:
        for block in moe_blocks(model):
            block.experts.hold(experts)


def held_experts(model: nn.Module) -> range | None:
    """The experts of each layer that `model` has room for; None: all."""
    for block in moe_blocks(model):
        experts = block.experts
        return None if len(experts.held) == experts.num_experts else experts.held
    return None


def agree(model: nn.Module, hidden_BSD: Tensor) -> Any:
    """What the ranks that share the experts of `model` settle before one forward over `hidden_BSD`."""
    block = next(moe_blocks(model), None)
    num_tokens = hidden_BSD.shape[0] * hidden_BSD.shape[1]
    return None if block is None else block.dispatcher.agree(num_tokens, hidden_BSD.device)
