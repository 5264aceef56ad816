"""The routed experts' weights, stacked, and the plugin that multiplies with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afmoe.moe.compute import ExpertCompute


class Experts(nn.Module):
    """Gated feed-forward experts as three tensors, so that one grouped product serves all of them."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, compute: ExpertCompute
    ) -> None:
        super().__init__()
        self.compute = compute
        self.gate_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, rows_RD: Tensor, offsets_L: Tensor) -> Tensor:
        """Rows sorted by expert, `offsets_L` the row at which each expert ends."""
        return self.compute(rows_RD, offsets_L, self.gate_proj, self.up_proj, self.down_proj)

    def extra_repr(self) -> str:
        return f"{tuple(self.gate_proj.shape)}, {self.compute.description}"
