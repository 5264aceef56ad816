"""Token dispatch: bring each token's copies to its experts, and bring the answers back.

The experts of a model are shared by the ranks of a process group, in runs: of E experts and W ranks, rank r
owns those from r E / W up to (r + 1) E / W. Three calls a layer, in this order, all ranks together:

    plan = dispatcher.plan(expert_ids_TK, token_mask_T)     sorts, starts to exchange what the ranks must know
    dispatched = dispatcher.dispatch(tokens_TD, weights_TK, plan)        the rows of this rank's experts
    tokens_TD = dispatcher.combine(rows_RD, dispatched.state)            their answers, summed

Work that needs neither (the shared expert) belongs between `plan` and `dispatch`. The contract that every
plugin keeps, and that tests/compute and tests/dispatch check:

- `dispatch` returns the rows of the local experts, sorted by expert, and `offsets_L`, the row at which each
  ends (int32). Rows past `offsets_L[-1]` are padding that belongs to nobody; their content has no meaning.
- An expert's rows come in the order of their ranks, and of their tokens within a rank: what blocks of rows
  are quantized together does not depend on the number of ranks.
- A token whose mask is False goes to no expert, is counted nowhere, and comes out of `combine` exactly zero.
- `counts_E` (int64) is exact: routed copies of this rank's real tokens, for every expert of the model.
- `combine` returns the tokens that `dispatch` was given, in order. It multiplies each row by its fp32 weight,
  sums a token's K rows in fp32 and casts the sum to the rows' dtype (as transformers does). The order of a
  token's experts changes only the rounding of that sum.
- With `score_before_experts` the weight is multiplied onto the row before the experts instead: in fp32,
  rounded once.
- A dispatcher keeps nothing of a call: what `combine` and backward need is in `state` and in the graph.
- A rank may receive nothing, send nothing, have no tokens at all.
- Nothing waits for the GPU but what the transport needs: `local` nothing, the others once, for the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from afmoe import registry
from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.grouped_mm import RowSource


@dataclass(frozen=True)
class Dispatched:
    """What `dispatch` hands on."""

    rows_RD: Tensor
    """Copies for the local experts, sorted by expert, padding last."""
    offsets_L: Tensor
    """int32: the row at which each local expert ends."""
    state: Any
    """For `combine` of the same dispatcher."""
    source: RowSource | None = None
    """Where the rows come from, if that lies in this process."""


class Dispatcher(Protocol):
    """What a plugin of the group `moe/dispatch` offers, made by `make_dispatcher`."""

    Config: ClassVar[type]
    name: ClassVar[str]
    leaves_graph: ClassVar[bool]
    """Whether `torch.compile` has to break its graph around the calls."""

    def __init__(self, config: Any, *, num_experts: int, process_group: Any = None) -> None:
        """`num_experts` counts the whole model's experts (E); `process_group`: the ranks that share them."""
        ...

    @classmethod
    def why_not(cls, config: Any, *, hardware: Hardware, precision: str) -> str | None:
        """Why several expert ranks cannot run there and what would, in one sentence; None: they can.

        `precision`: Lightning's name, such as `bf16-mixed`.
        """
        ...

    def agree(self, num_tokens: int, device: torch.device) -> Any:
        """What the ranks must settle before the layers of a forward, for `plan`. None: nothing.

        `num_tokens`: this rank's. All ranks together, once a forward.
        """
        ...

    def plan(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None, agreed: Any = None) -> Any:
        """The plugin's own record, with `counts_E` in it.

        `expert_ids_TK` int64; `token_mask_T` bool, None: all are real. `agreed`: what `agree` returned; None:
        settle it now.
        """
        ...

    def dispatch(
        self, tokens_TD: Tensor, weights_TK: Tensor, plan: Any, *, score_before_experts: bool = False
    ) -> Dispatched:
        """Bring the copies to their experts. Differentiable in tokens and weights (fp32)."""
        ...

    def combine(self, rows_RD: Tensor, state: Any) -> Tensor:
        """The tokens_TD: each the sum of its K rows, weighted. Differentiable in rows and weights."""
        ...


def make_dispatcher(choice: Any, *, num_experts: int, process_group: Any = None) -> Dispatcher:
    """The chosen plugin; `local` where one rank holds every expert, whatever is chosen."""
    config = registry.configure("moe/dispatch", choice)
    if process_group is None or process_group.size() == 1:
        config = registry.configure("moe/dispatch", "local")
    return registry.build(config, num_experts=num_experts, process_group=process_group)


def check_dispatch(choice: Any, *, hardware: Hardware, precision: str) -> None:
    """Raise `MachineError` with the plugin's reason when several expert ranks cannot run there."""
    config = registry.configure("moe/dispatch", choice)
    reason = registry.plugin_of(config).why_not(config, hardware=hardware, precision=precision)
    if reason is not None:
        raise MachineError(reason)


def refuse_several_ranks(num_ranks: int) -> None:
    """`local` cannot reach the experts of other ranks."""
    if num_ranks > 1:
        raise ConfigError(
            "moe/dispatch=local keeps every expert in one process, but here "
            f"{num_ranks} ranks share them; use moe/dispatch=all_to_all"
        )
