"""The weights of a model that starts from nothing."""

from __future__ import annotations

import torch
from torch import nn

from afmoe.config import AfmoeConfig
from afmoe.layers import RMSNorm
from afmoe.moe.block import moe_blocks
from afmoe.moe.experts import Experts


@torch.no_grad()
def init_weights(model: nn.Module, config: AfmoeConfig) -> None:
    """Draw every weight of `model` anew, module after module: the order decides what a seed gives."""
    std = config.initializer_range
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Experts):
            module.init_weights(std)
    for block in moe_blocks(model):
        nn.init.zeros_(block.router.selection_bias)
        if config.router_init == "zero":
            nn.init.zeros_(block.router.gate.weight)
