"""Token dispatch: bring each token's copies to its experts, and bring the answers back.

The experts of a model are shared by the ranks of a process group, in runs: of E experts and S ranks, rank r
owns those from r E / S up to (r + 1) E / S. Three calls a layer, in this order, all ranks together:

    plan = dispatcher.plan(expert_ids_TK, token_mask_T)     sorts, starts to exchange what the ranks must know
    dispatched = dispatcher.dispatch(tokens_TD, plan)       the rows of this rank's experts
    tokens_TD = dispatcher.combine(rows_RD, weights_TK, dispatched.state)

Work that needs neither (the shared expert) belongs between `plan` and `dispatch`. The contract that every
plugin keeps, and that tests/compute and tests/dispatch check:

- `dispatch` returns the rows of the local experts, sorted by expert, and `offsets_L`, the row at which each
  ends (int32). Rows past `offsets_L[-1]` are padding that belongs to nobody; their content has no meaning.
- An expert's rows come in the order of their ranks, and of their tokens within a rank.
- A token whose mask is False goes to no expert, is counted nowhere, and comes out of `combine` exactly zero.
- `counts_E` (int64) is exact: routed copies of this rank's real tokens, for every expert of the model.
- `combine` returns the tokens that `dispatch` was given, in order. It multiplies each row by its fp32 weight,
  sums a token's K rows in fp32 and casts the sum to the rows' dtype (as transformers does). The order of a
  token's experts changes only the rounding of that sum.
- Weights given to `dispatch` instead are multiplied onto the rows before the experts, in fp32, rounded once;
  `combine` gets None and sums.
- A dispatcher keeps nothing of a call: what `combine` and backward need is in `state` and in the graph.
- A rank may receive nothing, send nothing, have no tokens at all.
- Nothing waits for the GPU but what the transport needs: `local` nothing, the others once, for the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from afmoe import registry
from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.grouped_mm import RowSource


class DispatchPlan(Protocol):
    """What `plan` hands on: the plugin's own, but for the counts."""

    @property
    def counts_E(self) -> Tensor:
        """int64: routed copies of this rank's real tokens, per expert of the whole model."""
        ...


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

    def __init__(self, config: Any, *, num_experts: int, process_group: Any = None) -> None:
        """`num_experts` counts the whole model's experts (E); `process_group`: the ranks that share them."""
        ...

    @classmethod
    def why_not(cls, config: Any, *, hardware: Hardware) -> str | None:
        """Why several expert ranks cannot run there and what would, in one sentence; None: they can."""
        ...

    def plan(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None) -> Any:
        """A `DispatchPlan`. `expert_ids_TK` int64; `token_mask_T` bool, None: all are real."""
        ...

    def dispatch(self, tokens_TD: Tensor, plan: Any, weights_TK: Tensor | None = None) -> Dispatched:
        """Bring the copies to their experts. `weights_TK`: multiply each copy by its weight first."""
        ...

    def combine(self, rows_RD: Tensor, weights_TK: Tensor | None, state: Any) -> Tensor:
        """The tokens_TD: each the sum of its K rows, weighted. Differentiable in rows and weights (fp32)."""
        ...


def make_dispatcher(choice: Any, *, num_experts: int, process_group: Any = None) -> Dispatcher:
    """The chosen plugin; `local` where one rank holds every expert, whatever is chosen."""
    config = registry.configure("moe/dispatch", choice)
    if process_group is None or process_group.size() == 1:
        config = registry.configure("moe/dispatch", "local")
    return registry.build(config, num_experts=num_experts, process_group=process_group)


def check_dispatch(choice: Any, hardware: Hardware) -> None:
    """Raise `MachineError` with the plugin's reason when several expert ranks cannot run there."""
    config = registry.configure("moe/dispatch", choice)
    reason = registry.plugin_of(config).why_not(config, hardware=hardware)
    if reason is not None:
        raise MachineError(reason)


def refuse_several_ranks(num_ranks: int) -> None:
    """`local` cannot reach the experts of other ranks."""
    if num_ranks > 1:
        raise ConfigError(
            "moe/dispatch=local keeps every expert in one process, but here "
            f"{num_ranks} ranks share them; use moe/dispatch=all_to_all"
        )
