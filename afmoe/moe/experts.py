"""The routed experts' weights, stacked, and the plugin that multiplies with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afmoe.moe.compute import ExpertCompute
from afmoe.moe.grouped_mm import RowSource


class Experts(nn.Module):
    """Feed-forward experts as stacked tensors, so that one grouped product serves all of them.

    `gated`: hidden = activation(gate(x)) * up(x), else activation(up(x)) and there is no `gate_proj`.
    `has_bias`: every projection has one. The compute plugin is asked about both before the experts are made,
    by `check_compute`.
    """

    gate_proj: nn.Parameter | None
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_proj_bias: nn.Parameter | None
    up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        compute: ExpertCompute,
        *,
        gated: bool = True,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.compute = compute
        self.has_bias = has_bias
        self.num_experts = num_experts
        self.held = range(num_experts)
        """Those whose weights are here; other processes hold the rest."""
        into, back = (intermediate_size, hidden_size), (hidden_size, intermediate_size)

        def stacked(*shape: int, present: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num_experts, *shape)) if present else None

        self.register_parameter("gate_proj", stacked(*into, present=gated))
        self.register_parameter("up_proj", stacked(*into))
        self.register_parameter("down_proj", stacked(*back))
        self.register_parameter("gate_proj_bias", stacked(intermediate_size, present=gated and has_bias))
        self.register_parameter("up_proj_bias", stacked(intermediate_size, present=has_bias))
        self.register_parameter("down_proj_bias", stacked(hidden_size, present=has_bias))

    def forward(self, rows_RD: Tensor, offsets_L: Tensor, source: RowSource | None = None) -> Tensor:
        """Rows sorted by expert, the row at which each ends, and what the rows were gathered from."""
        weights = (self.gate_proj, self.up_proj, self.down_proj)
        biases = (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias) if self.has_bias else None
        return self.compute(rows_RD, offsets_L, *weights, biases, source)

    def hold(self, experts: range) -> None:
        """Have room for these consecutive experts only. On the meta device, before there are weights."""
        for name, weight in list(self.named_parameters()):
            assert weight.is_meta, f"{name} has memory already"
            own = torch.empty_like(weight[experts.start : experts.stop])
            setattr(self, name, nn.Parameter(own, weight.requires_grad))
        self.held = experts

    @property
    def num_parameters_elsewhere(self) -> int:
        """Of the experts that are not held."""
        num_held = len(self.held)
        held = sum(weight.numel() for weight in self.parameters())
        return held // num_held * (self.num_experts - num_held)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Matrices from N(0, std), biases 0: what all experts would get, whichever are held."""
        for name, weight in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(weight)
            elif len(self.held) == self.num_experts:
                nn.init.normal_(weight, std=std)
            else:
                weight.copy_(self._drawn_among_all(weight, std))

    def _drawn_among_all(self, weight: Tensor, std: float) -> Tensor:
        """The held part of one whole tensor, so that every process draws the same numbers."""
        whole = weight.new_empty(self.num_experts, *weight.shape[1:])
        return nn.init.normal_(whole, std=std)[self.held.start : self.held.stop]

    def extra_repr(self) -> str:
        return f"{tuple(self.up_proj.shape)}, {self.compute.description}"
