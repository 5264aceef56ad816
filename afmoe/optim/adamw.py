"""AdamW with decay and no-decay groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from afmoe.optim.groups import parameter_groups
from afmoe.optim.options import OptimOptions, check_betas, check_eps
from afmoe.registry import register


@register("optim", "adamw")
class AdamW:
    """Makes `torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101) for a model."""

    @dataclass(kw_only=True)
    class Config(OptimOptions):
        lr: float = 4e-3
        weight_decay: float = 0.01
        betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
        eps: float = 1e-8

        def __post_init__(self) -> None:
            super().__post_init__()
            check_betas(self.betas)
            check_eps(self.eps)

    def __init__(self, config: Config) -> None:
        self.config = config

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters. Raises `ConfigError` when all are frozen."""
        return torch.optim.AdamW(
            parameter_groups(model, self.config, matrices={"rule": "adamw"}, others={"rule": "adamw"}),
            lr=self.config.lr,
            betas=(self.config.betas[0], self.config.betas[1]),
            eps=self.config.eps,
            # one kernel over all parameters, on CPU too; of torch's three implementations it alone skips a
            # step (`found_inf`) without waiting for the device
            fused=True,
        )
