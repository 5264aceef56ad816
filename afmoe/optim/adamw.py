"""AdamW with decay and no-decay groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from afmoe.errors import ConfigError
from afmoe.optim.groups import parameter_groups
from afmoe.registry import register


@register("optim", "adamw")
class AdamW:
    """Makes `torch.optim.AdamW` (Loshchilov and Hutter, arXiv 1711.05101) for a model."""

    @dataclass(kw_only=True)
    class Config:
        lr: float = 4e-3
        betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
        eps: float = 1e-8
        weight_decay: float = 0.01
        gradient_clip: float | None = 1.0
        """Largest global gradient norm; None: no clipping."""

        def __post_init__(self) -> None:
            if not self.lr > 0:
                raise ConfigError(f"optim.lr must be positive, got {self.lr}")
            if self.betas is None or len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
                raise ConfigError(f"optim.betas takes two numbers in [0, 1), got {self.betas}")
            if not self.eps > 0:
                raise ConfigError(f"optim.eps must be positive, got {self.eps}")
            if self.weight_decay < 0:
                raise ConfigError(f"optim.weight_decay must not be negative, got {self.weight_decay}")
            if self.gradient_clip is not None and not self.gradient_clip > 0:
                raise ConfigError(
                    f"optim.gradient_clip must be positive, or null for no clipping, got {self.gradient_clip}"
                )

    def __init__(self, config: Config) -> None:
        self.config = config

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters. Raises `ConfigError` when all are frozen."""
        groups = parameter_groups(model, self.config.weight_decay)
        if not groups:
            raise ConfigError("no parameter is left to train: every one is frozen")
        return torch.optim.AdamW(
            groups,
            lr=self.config.lr,
            betas=(self.config.betas[0], self.config.betas[1]),
            eps=self.config.eps,
            # one kernel over all parameters, on CPU too
            fused=True,
        )
