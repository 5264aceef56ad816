"""Data parallel: every process holds the whole model and its own batches."""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.errors import ConfigError
from afmoe.registry import register


@register("trainer/strategy", "ddp")
class DdpStrategy:
    """Lightning's `DDPStrategy`."""

    @dataclass(kw_only=True)
    class Config:
        process_group_backend: str | None = None
        """None: nccl on GPUs, gloo on CPUs."""
        find_unused_parameters: bool = False

        def __post_init__(self) -> None:
            if self.process_group_backend not in (None, "gloo", "nccl"):
                raise ConfigError(
                    "trainer.strategy.process_group_backend takes gloo, nccl or null, got "
                    f"{self.process_group_backend}"
                )

    def __init__(self, config: Config) -> None:
        from lightning.pytorch.strategies import DDPStrategy

        self.strategy = DDPStrategy(
            process_group_backend=config.process_group_backend,
            find_unused_parameters=config.find_unused_parameters,
        )
