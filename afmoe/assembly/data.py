"""The data module of a run."""

from __future__ import annotations

from afmoe.assembly.source import ModelSource
from afmoe.config import RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.flops import ModelFlops
from afmoe.registry import configure


def make_data(config: RunConfig, source: ModelSource) -> AfmoeDataModule:
    """The rows read, rendered and counted; packs are planned when the trainer asks for batches."""
    data = AfmoeDataModule(
        configure("data", config.data),
        source.tokenizer,
        seed=config.seed,
        accumulate=config.trainer.accumulate_grad_batches,
        count_flops=ModelFlops.of(source.config).training,
    )
    data.setup()
    return data
