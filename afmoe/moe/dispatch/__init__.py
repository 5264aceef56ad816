"""Token dispatch: bring each token's copies to its experts, and bring the answers back.

The contract that every plugin keeps, and that tests/compute checks:

- `dispatch` returns the rows of the local experts, sorted by expert, and `offsets_L`, the row at which each
  ends (int32). Rows past `offsets_L[-1]` are padding that belongs to nobody; their content has no meaning.
- A token whose mask is False goes to no expert, is counted nowhere, and comes out of `combine` exactly zero.
- `counts_E` (int64) is exact: routed copies of this rank's real tokens, for every expert of the model.
- `combine` multiplies each row by its fp32 weight, sums a token's K rows in fp32 and casts the sum to the
  rows' dtype (as transformers does). The order of a token's experts changes only the rounding of that sum.
- No shape depends on the routing, so nothing waits for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from afmoe.moe.grouped_mm import RowSource


@dataclass(frozen=True)
class Dispatched:
    """What `dispatch` hands on."""

    rows_RD: Tensor
    """Copies for the local experts, sorted by expert, padding last."""
    offsets_L: Tensor
    """int32: the row at which each local expert ends."""
    counts_E: Tensor
    """int64: routed copies of this rank's real tokens, per expert of the whole model."""
    state: Any
    """For `combine` of the same dispatcher."""
    source: RowSource | None = None
    """Where the rows come from, if that lies in this process."""


class Dispatcher(Protocol):
    """What a plugin of the group `moe/dispatch` offers, made by `registry.build(config, num_experts=...)`."""

    Config: ClassVar[type]
    name: ClassVar[str]

    def __init__(self, config: Any, *, num_experts: int, process_group: Any = None) -> None:
        """`num_experts` counts the whole model's experts (E); `process_group`: the ranks that share them."""
        ...

    def dispatch(self, tokens_TD: Tensor, expert_ids_TK: Tensor, token_mask_T: Tensor | None) -> Dispatched:
        """Sort the copies by expert. `expert_ids_TK` int64; `token_mask_T` bool, None: all are real."""
        ...

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, state: Any) -> Tensor:
        """The tokens_TD: each the weighted sum of its K rows. Differentiable in rows and weights (fp32)."""
        ...
