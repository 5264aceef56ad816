"""The plugins that one model is made of."""

from __future__ import annotations

from typing import Any

from afmoe import registry
from afmoe.attention import check_attention
from afmoe.config import AfmoeConfig
from afmoe.errors import MachineError
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.compute import ExpertShape, check_compute
from afmoe.moe.dispatch import make_dispatcher


class ModelPlugins:
    """The plugins of one model, checked against the hardware before any weight exists."""

    def __init__(
        self, config: AfmoeConfig, attention: Any, compute: Any, dispatch: Any, hardware: Hardware | None
    ) -> None:
        hardware = hardware or detect_hardware()
        check_plugins(config, attention, compute, hardware)
        self.attention = registry.build(
            registry.configure("attention", attention), window=config.sliding_window, hardware=hardware
        )
        self.dispatch = registry.configure("moe/dispatch", dispatch)
        # for one process; a strategy that shares the experts puts its own dispatcher in its place
        self.dispatcher = make_dispatcher(dispatch, num_experts=config.num_experts)
        self._compute = registry.configure("moe/compute", compute)
        self._hardware = hardware
        self._shape = _shape(config)

    def make_compute(self) -> Any:
        """One a block: a plugin may keep a copy of its block's weights in another form."""
        return registry.build(self._compute, hardware=self._hardware, shape=self._shape)


def check_plugins(
    config: AfmoeConfig, attention: Any, compute: Any, hardware: Hardware, *, is_training: bool = False
) -> None:
    """Raise one `MachineError` with every reason for which a choice cannot run there; change nothing.

    `is_training`: refuse a choice that computes there and has no backward, too.
    """
    attention, compute = (
        registry.configure("attention", attention),
        registry.configure("moe/compute", compute),
    )
    reasons = []
    for check in (
        lambda: check_attention(
            registry.plugin_of(attention),
            attention,
            hardware=hardware,
            head_dim=config.head_dim,
            dropout=config.attention_dropout,
            is_training=is_training,
        ),
        lambda: check_compute(registry.plugin_of(compute), compute, hardware=hardware, shape=_shape(config)),
    ):
        try:
            check()
        except MachineError as error:
            reasons.append(str(error))
    if reasons:
        raise MachineError(". Also, ".join(reasons))


def _shape(config: AfmoeConfig) -> ExpertShape:
    return ExpertShape(
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        activation=config.hidden_act,
    )
