"""Refuses before anything slow what a run could not do, now or at its end."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from afmoe.assembly.source import ModelSource, meta_model
from afmoe.checkpoint.config_file import config_fields
from afmoe.checkpoint.layouts import LAYOUTS
from afmoe.config import AfmoeConfig, RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.errors import ConfigError, MachineError, closest
from afmoe.hardware import Hardware
from afmoe.memory import check_compiled_experts, check_memory_settings
from afmoe.model_plugins import check_plugins
from afmoe.module import VALIDATION_FIGURES
from afmoe.optim.groups import check_patterns
from afmoe.optim.schedules import refuse_without_length
from afmoe.parallel.deepspeed import check_strategy
from afmoe.planning import Setup, least_bytes
from afmoe.plugins import PLUGINS
from afmoe.registry import build, configure, plugin_of
from callbacks.early_stopping import EarlyStopping
from callbacks.freeze_router import FreezeRouter


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
    limits = config.trainer
    if limits.max_steps == -1 and limits.max_epochs in (None, -1) and limits.max_tokens is None:
        refuse_without_length(build(configure("scheduler", config.scheduler)))


def check_model(config: RunConfig, source: ModelSource, hardware: Hardware) -> None:
    """Refuse plugins that cannot train this model on this hardware, an export that the model does not allow,
    and patterns of `optim.freeze` and `optim.rates` that do nothing to it.
    """
    check_plugins(source.config, config.attention, config.moe.compute, hardware, is_training=True)
    compute = plugin_of(configure("moe/compute", config.moe.compute))
    check_compiled_experts(config.memory, source.config, compute)
    _check_export(config, source)
    options = configure("optim", config.optim)
    if options.freeze or options.rates:
        model = meta_model(config, source, hardware)
        chosen = [configure("callbacks", section) for section in config.callbacks.values()]
        also_frozen = [FreezeRouter.frozen for one in chosen if isinstance(one, FreezeRouter.Config)]
        check_patterns((name for name, _ in model.named_parameters()), options, also_frozen)


def check_validation(config: RunConfig, data: AfmoeDataModule) -> None:
    """Refuse a figure of the validation that the run is to go by and that no validation will log."""
    watched = {"checkpoint.best_metric": config.checkpoint.best_metric}
    for section in config.callbacks.values():
        options = configure("callbacks", section)
        if isinstance(options, EarlyStopping.Config):
            watched["callbacks.early_stopping.monitor"] = options.monitor
    known = [*VALIDATION_FIGURES, data.source.exact_match_metric]
    # what callbacks of other packages log is seen at the first validation, which comes before training
    is_complete = all(section["name"] in PLUGINS["callbacks"] for section in config.callbacks.values())
    for key, figure in watched.items():
        if figure is None:
            continue
        if not len(data.validation_split) or config.trainer.limit_val_batches == 0:
            raise ConfigError(
                f"{key}={figure} is a figure of the validation, and no row is held out to validate on; set "
                "data.validation_fraction, data.validation_files or trainer.limit_val_batches"
            )
        if is_complete and figure not in known:
            raise ConfigError(
                f"{key}={figure} is not logged at validation; choose one of: "
                f"{closest(figure, [name for name in known if name is not None])}"
            )


def check_parallelism(
    config: RunConfig, source: ModelSource, trainer: pl.Trainer, hardware: Hardware
) -> None:
    """Refuse what the strategy cannot share among the trainer's processes."""
    check_strategy(config, source.config, world_size=trainer.world_size, hardware=hardware)


def check_memory(config: RunConfig, source: ModelSource, hardware: Hardware) -> None:
    """Refuse a model that the hardware's memory cannot hold."""
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
