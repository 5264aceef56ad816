"""The attention layer of AFMoE: normed queries and keys, grouped heads, a sigmoid gate on their output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from afmoe.attention import AttentionPlugin
from afmoe.attention.cache import LayerCache
from afmoe.config import SLIDING_ATTENTION, AfmoeConfig
from afmoe.layers import RMSNorm, rotate


class Attention(nn.Module):
    """Sliding layers carry the rotary embedding; full layers have none and learn order from the mask."""

    def __init__(self, config: AfmoeConfig, layer_index: int, plugin: AttentionPlugin) -> None:
        super().__init__()
        assert config.layer_types is not None
        assert config.num_key_value_heads is not None
        self.is_sliding = config.layer_types[layer_index] == SLIDING_ATTENTION
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.plugin = plugin
        width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_order)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_order)

    def forward(
        self,
        hidden_BSD: Tensor,
        prepared: Any,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`prepared`: the plugin's masks; `rotary`: cosines, sines [B, S, 1, C/2]; both once per forward."""
        query_BSHC = self.q_norm(self._heads(self.q_proj(hidden_BSD)))
        key_BSGC = self.k_norm(self._heads(self.k_proj(hidden_BSD)))
        value_BSGC = self._heads(self.v_proj(hidden_BSD))
        if self.is_sliding:
            query_BSHC, key_BSGC = rotate(query_BSHC, *rotary), rotate(key_BSGC, *rotary)
        if cache is not None:
            key_BSGC, value_BSGC = cache.update(key_BSGC, value_BSGC)
        mixed_BSHC = self.plugin(
            query_BSHC,
            key_BSGC,
            value_BSGC,
            prepared,
            is_sliding=self.is_sliding,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.o_proj(mixed_BSHC.flatten(2) * torch.sigmoid(self.gate_proj(hidden_BSD)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))
