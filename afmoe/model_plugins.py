"""The plugins that one model is made of."""

from __future__ import annotations

from typing import Any

from afmoe import registry
from afmoe.attention import check_attention
from afmoe.config import AfmoeConfig
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.compute import check_compute


class ModelPlugins:
    """The plugins of one model, checked against the hardware before any weight exists."""

    def __init__(
        self, config: AfmoeConfig, attention: Any, compute: Any, dispatch: Any, hardware: Hardware | None
    ) -> None:
        hardware = hardware or detect_hardware()
        attention_config = registry.configure("attention", attention)
        check_attention(
            registry.plugin_of(attention_config),
            attention_config,
            hardware=hardware,
            head_dim=config.head_dim,
            dropout=config.attention_dropout,
        )
        self.attention = registry.build(attention_config, window=config.sliding_window, hardware=hardware)
        self.dispatcher = registry.build(
            registry.configure("moe/dispatch", dispatch), num_experts=config.num_experts
        )
        self._compute = registry.configure("moe/compute", compute)
        self._hardware = hardware
        self._sizes: dict[str, Any] = {
            "num_experts": config.num_experts,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.moe_intermediate_size,
            "activation": config.hidden_act,
        }
        plugin: Any = registry.plugin_of(self._compute)
        check_compute(plugin, self._compute, hardware=hardware, **self._sizes)

    def make_compute(self) -> Any:
        """One a block: a plugin may keep a copy of its block's weights in another form."""
        return registry.build(self._compute, hardware=self._hardware, **self._sizes)
