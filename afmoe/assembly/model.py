"""The model of a run with its weights, and the module that trains it."""

from __future__ import annotations

import logging

import lightning.pytorch as pl

from afmoe.assembly.checks import check_memory
from afmoe.assembly.source import ModelSource, chosen_plugins, meta_model
from afmoe.checkpoint.pretrained import load_pretrained
from afmoe.checkpoint.vocabulary import resize_vocabulary
from afmoe.config import RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.hardware import Hardware
from afmoe.memory import use_memory_settings
from afmoe.model import AfmoeForCausalLM
from afmoe.module import AfmoeModule
from afmoe.moe.block import hold_experts
from afmoe.parallel.deepspeed import rank_experts
from afmoe.registry import build, configure

log = logging.getLogger(__name__)


def make_model(
    config: RunConfig,
    source: ModelSource,
    trainer: pl.Trainer,
    hardware: Hardware,
    *,
    weights_follow: bool = False,
) -> AfmoeForCausalLM:
    """The model with its weights, drawn anew or read; of the experts those that this process is to hold.

    `weights_follow`: a run checkpoint will fill them in, so that trained weights need not be read.
    """
    check_memory(config, source, hardware)
    expert_range = rank_experts(trainer.strategy, source.config.num_experts)
    if source.directory is not None and not weights_follow:
        plugins = chosen_plugins(config, hardware)
        model = load_pretrained(source.directory, expert_range=expert_range, **plugins)
    else:
        # without memory first: torch's own layers would draw weights that are drawn anew
        model = meta_model(config, source, hardware)
        hold_experts(model, expert_range)
        model.to_empty(device="cpu")
        if not weights_follow:
            model.init_weights()
    sequence_length, longest = config.data["sequence_length"], model.config.max_position_embeddings
    if sequence_length > longest:
        log.warning(
            "data.sequence_length=%d goes beyond max_position_embeddings=%d", sequence_length, longest
        )
    if len(source.tokenizer) > model.config.vocab_size:
        log.info(resize_vocabulary(model, len(source.tokenizer)))
    use_memory_settings(model, config.memory)
    return model


def make_module(config: RunConfig, model: AfmoeForCausalLM, data: AfmoeDataModule) -> AfmoeModule:
    return AfmoeModule(
        model,
        optim=build(configure("optim", config.optim)),
        scheduler=build(configure("scheduler", config.scheduler)),
        seed=config.seed,
        exact_match_metric=data.source.exact_match_metric,
    )
