"""Refuses before anything slow what a run could not do, now or at its end."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from afmoe.assembly.source import ModelSource, meta_model
from afmoe.checkpoint.config_file import config_fields
from afmoe.checkpoint.layouts import LAYOUTS
from afmoe.config import AfmoeConfig, RunConfig
from afmoe.errors import ConfigError, MachineError, closest
from afmoe.hardware import Hardware
from afmoe.memory import check_memory_settings
from afmoe.model_plugins import check_plugins
from afmoe.optim.groups import check_patterns
from afmoe.parallel.deepspeed import check_strategy
from afmoe.planning import Setup, least_bytes
from afmoe.registry import configure


def check_choices(config: RunConfig, hardware: Hardware) -> None:
    """Let each chosen plugin's `Config` judge its options. Raises `ConfigError`, `MachineError`."""
    check_memory_settings(config.memory, hardware)
    for group, section in (
        ("optim", config.optim),
        ("scheduler", config.scheduler),
        ("trainer/strategy", config.trainer.strategy),
        ("logger", config.logger),
        ("attention", config.attention),
        ("moe/compute", config.moe.compute),
        ("moe/dispatch", config.moe.dispatch),
        *(("callbacks", section) for section in config.callbacks.values()),
    ):
        configure(group, section)


def check_model(config: RunConfig, source: ModelSource, hardware: Hardware) -> None:
    """Refuse an export that the model does not allow, and patterns of `optim.freeze` and `optim.rates` that
    name none of its parameters.
    """
    _check_export(config, source)
    options = configure("optim", config.optim)
    if options.freeze or options.rates:
        model = meta_model(config, source, hardware)
        check_patterns((name for name, _ in model.named_parameters()), options)


def check_parallelism(
    config: RunConfig, source: ModelSource, trainer: pl.Trainer, hardware: Hardware
) -> None:
    """Refuse what the strategy cannot share among the trainer's processes."""
    check_strategy(config, source.config, world_size=trainer.world_size, hardware=hardware)


def check_hardware(config: RunConfig, source: ModelSource, hardware: Hardware) -> None:
    """Refuse plugins that the hardware cannot run, and a model that its memory cannot hold."""
    check_plugins(source.config, config.attention, config.moe.compute, hardware, is_training=True)
    needed_gib = training_memory_gib(config, source.config, hardware)
    if needed_gib > hardware.memory_gib:
        parameters = meta_model(config, source, hardware).num_parameters()
        where = "each GPU" if hardware.is_cuda else "this machine"
        raise MachineError(
            f"training {parameters / 1e9:.2f} billion parameters needs at least {needed_gib:.0f} GiB "
            f"(weights, gradients, optimizer states), {where} has {hardware.memory_gib:.0f} GiB; choose "
            "model=afmoe_mini, or shrink the model, e.g. model.num_hidden_layers=4; scripts/plan.py with the "
            "same overrides says what each setting would save"
        )


def training_memory_gib(config: RunConfig, model: AfmoeConfig, hardware: Hardware) -> float:
    """The least that training takes of one GPU, or on CPUs of this machine: see `afmoe.planning`."""
    setup = Setup.of(config, model, hardware=hardware)
    # processes on CPUs share the machine's memory
    ranks = 1 if hardware.is_cuda else setup.num_ranks // config.trainer.num_nodes
    return ranks * least_bytes(setup) / 2**30


def _check_export(config: RunConfig, source: ModelSource) -> None:
    if not config.export.enabled:
        return
    layout = config.export.layout
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown export.layout={layout}; choose one of: {closest(layout, LAYOUTS)}")
    try:
        config_fields(source.config, layout, torch.float32)
    except ConfigError as error:
        raise ConfigError(f"the export would fail: {error} (export.layout, export.enabled=false)") from error
