"""From the typed config to the objects of a run: tokenizer, data, model, module, trainer.

Each function makes one of them and checks what it was asked for before it does anything slow.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from transformers import PreTrainedTokenizerBase

from afmoe.checkpoint.config_file import config_fields, read_config
from afmoe.checkpoint.hub import resolve_pretrained, resolve_tokenizer
from afmoe.checkpoint.layouts import LAYOUTS
from afmoe.checkpoint.lightning_io import RunCheckpointIO
from afmoe.checkpoint.pretrained import load_pretrained
from afmoe.checkpoint.vocabulary import resize_vocabulary
from afmoe.config import AfmoeConfig, ModelConfig, RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.data.tokenizer import has_tokenizer, load_tokenizer
from afmoe.errors import ConfigError, MachineError, closest
from afmoe.fault_record import save_fault
from afmoe.hardware import Hardware
from afmoe.memory import check_memory_settings, use_memory_settings
from afmoe.model import AfmoeForCausalLM
from afmoe.model_plugins import check_plugins
from afmoe.model_shape import model_shape
from afmoe.module import AfmoeModule
from afmoe.moe.block import hold_experts
from afmoe.optim.groups import check_patterns
from afmoe.optim.loss_scaling import LossScaling
from afmoe.parallel.deepspeed import check_strategy, choose_accelerator, rank_experts
from afmoe.planning import Setup, least_bytes
from afmoe.registry import build, configure
from afmoe.run import Run
from afmoe.signals import StopSignals
from callbacks.run_metrics import RunMetrics

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """What the model is: its config, and the directory of its trained weights (None: drawn anew)."""

    config: AfmoeConfig
    directory: Path | None


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


def make_tokenizer(config: RunConfig, pretrained: Path | None) -> PreTrainedTokenizerBase:
    """`tokenizer.path`, else the one beside the trained weights, else the embedded byte tokenizer."""
    if config.tokenizer.path is None and pretrained is not None:
        if not has_tokenizer(pretrained):
            raise ConfigError(f"model.pretrained={pretrained} holds no tokenizer; set tokenizer.path")
        return load_tokenizer(str(pretrained))
    path = config.tokenizer.path
    return load_tokenizer(None if path is None else str(resolve_tokenizer(path)))


def find_pretrained(config: ModelConfig) -> Path | None:
    return None if config.pretrained is None else resolve_pretrained(config.pretrained, config.revision)


def model_source(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, pretrained: Path | None
) -> ModelSource:
    """The model's config, see `model_shape`, and where its weights are."""
    special_ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    stored = None if pretrained is None else read_config(pretrained)
    return ModelSource(model_shape(config, len(tokenizer), special_ids, stored, pretrained), pretrained)


def check_export(config: RunConfig, source: ModelSource) -> None:
    """Refuse now what could not be exported at the end: an unknown layout, a model that it cannot express."""
    if not config.export.enabled:
        return
    layout = config.export.layout
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown export.layout={layout}; choose one of: {closest(layout, LAYOUTS)}")
    try:
        config_fields(source.config, layout, torch.float32)
    except ConfigError as error:
        raise ConfigError(f"the export would fail: {error} (export.layout, export.enabled=false)") from error


def check_optimizer(config: RunConfig, source: ModelSource) -> None:
    """Refuse now a pattern of `optim.freeze` or `optim.rates` that names no parameter of the model."""
    options = configure("optim", config.optim)
    if options.freeze or options.rates:
        check_patterns((name for name, _ in meta_model(source, {}).named_parameters()), options)


def make_model(
    config: RunConfig,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    hardware: Hardware,
    *,
    expert_range: range | None = None,
    weights_follow: bool = False,
) -> AfmoeForCausalLM:
    """The model with its weights, drawn anew or read.

    `expert_range`: the experts that this process holds (`held_range`), the others' weights never exist here;
    None: all. `weights_follow`: a run checkpoint will fill them in, so that trained weights need not be read.
    """
    plugins: dict[str, Any] = {
        "attention": config.attention,
        "compute": config.moe.compute,
        "dispatch": config.moe.dispatch,
        "hardware": hardware,
    }
    check_plugins(source.config, config.attention, config.moe.compute, hardware, is_training=True)
    _refuse_too_large(config, source, hardware)
    if source.directory is not None and not weights_follow:
        model = load_pretrained(source.directory, expert_range=expert_range, **plugins)
    else:
        # without memory first: torch's own layers would draw weights that are drawn anew
        model = meta_model(source, plugins)
        hold_experts(model, expert_range)
        model.to_empty(device="cpu")
        if not weights_follow:
            model.init_weights()
    sequence_length, longest = config.data["sequence_length"], model.config.max_position_embeddings
    if sequence_length > longest:
        log.warning(
            "data.sequence_length=%d goes beyond max_position_embeddings=%d", sequence_length, longest
        )
    if len(tokenizer) > model.config.vocab_size:
        log.info(resize_vocabulary(model, len(tokenizer)))
    use_memory_settings(model, config.memory)
    return model


def meta_model(source: ModelSource, plugins: dict[str, Any]) -> AfmoeForCausalLM:
    """The model without memory, to count and to check."""
    with torch.device("meta"):
        return AfmoeForCausalLM(source.config, **plugins)


def training_memory_gib(config: RunConfig, model: AfmoeConfig, hardware: Hardware) -> float:
    """The least that training takes of one GPU, or on CPUs of this machine: see `afmoe.planning`."""
    setup = Setup.of(config, model, hardware=hardware)
    # processes on CPUs share the machine's memory
    ranks = 1 if hardware.is_cuda else setup.num_ranks // config.trainer.num_nodes
    return ranks * least_bytes(setup) / 2**30


def _refuse_too_large(config: RunConfig, source: ModelSource, hardware: Hardware) -> None:
    needed_gib = training_memory_gib(config, source.config, hardware)
    if needed_gib > hardware.memory_gib:
        parameters = meta_model(source, {"hardware": hardware}).num_parameters()
        where = "each GPU" if hardware.is_cuda else "this machine"
        raise MachineError(
            f"training {parameters / 1e9:.2f} billion parameters needs at least {needed_gib:.0f} GiB "
            f"(weights, gradients, optimizer states), {where} has {hardware.memory_gib:.0f} GiB; choose "
            "model=afmoe_mini, or shrink the model, e.g. model.num_hidden_layers=4; scripts/plan.py with the "
            "same overrides says what each setting would save"
        )


def make_module(config: RunConfig, model: AfmoeForCausalLM, data: AfmoeDataModule) -> AfmoeModule:
    return AfmoeModule(
        model,
        optim=build(configure("optim", config.optim)),
        scheduler=build(configure("scheduler", config.scheduler)),
        seed=config.seed,
        exact_match_metric=data.source.exact_match_metric,
    )


def make_callbacks(
    config: RunConfig, run: Run, data: AfmoeDataModule, metrics: RunMetrics, signals: StopSignals
) -> list[Callback]:
    """The clock, the chosen callbacks, then those of every run."""
    from callbacks.initial_validation import InitialValidation
    from callbacks.loss_scale import LossScale
    from callbacks.moe_callback import refuse_contradictions
    from callbacks.parameter_groups import ParameterGroups
    from callbacks.planned_rate import PlannedRate
    from callbacks.progress import Progress
    from callbacks.record_steps import RecordSteps
    from callbacks.run_length import RunLength
    from callbacks.save_checkpoints import SaveCheckpoints
    from callbacks.skip_bad_steps import SkipBadSteps
    from callbacks.stop_on_signal import StopOnSignal
    from callbacks.text_samples import TextSamples

    callbacks: list[Callback] = [metrics.throughput]
    callbacks += [build(configure("callbacks", section)) for section in config.callbacks.values()]
    refuse_contradictions(callbacks)
    callbacks += [metrics, RecordSteps(run.directory), ParameterGroups()]
    if config.logger.get("enabled", True):
        callbacks += [LearningRateMonitor(logging_interval="step"), PlannedRate()]
        if config.samples.count:
            callbacks.append(TextSamples(data, config.samples.count, config.samples.max_new_tokens))
    if config.trainer.enable_progress_bar:
        callbacks.append(Progress(metrics.throughput))
    if config.trainer.precision == "16-mixed":
        callbacks.append(LossScale())
    length = RunLength(config.trainer.max_time, config.trainer.max_tokens, metrics.throughput)
    bad_steps = SkipBadSteps(
        config.faults.max_skipped_steps, functools.partial(save_fault, config, run.directory)
    )
    saver = SaveCheckpoints(run, config.checkpoint) if config.checkpoint.every_n_steps else None
    # the last but the writer of checkpoints: what the others count belongs to a checkpoint that it asks for
    callbacks += [InitialValidation(), length, bad_steps, StopOnSignal(signals, saver)]
    return callbacks if saver is None else [*callbacks, saver]


def check_parallelism(
    config: RunConfig, source: ModelSource, trainer: pl.Trainer, hardware: Hardware
) -> None:
    """Refuse what the strategy cannot share among the trainer's processes."""
    check_strategy(config, source.config, world_size=trainer.world_size, hardware=hardware)


def held_range(source: ModelSource, trainer: pl.Trainer) -> range | None:
    """The experts of each layer that this process is to hold; None: all."""
    return rank_experts(trainer.strategy, source.config.num_experts)


def make_trainer(config: RunConfig, run: Run, callbacks: list[Callback], hardware: Hardware) -> pl.Trainer:
    settings = dataclasses.asdict(config.trainer)
    if isinstance(settings["devices"], list) and not hardware.is_cuda:
        # CPU processes have no numbers
        settings["devices"] = len(settings["devices"])
    if isinstance(settings["val_check_interval"], float):
        # a share is one of an epoch
        settings["check_val_every_n_epoch"] = settings["check_val_every_n_epoch"] or 1
    choose_accelerator(hardware)
    strategy = build(configure("trainer/strategy", settings.pop("strategy"))).strategy
    logger = build(
        configure("logger", config.logger), directory=run.directory, first_step=run.resume_step
    ).logger
    if logger is not None and settings["log_every_n_steps"] > settings["max_steps"] > 0:
        # a run shorter than the interval would leave an empty log
        settings["log_every_n_steps"] = settings["max_steps"]
    if settings["devices"] == "auto" and HydraConfig.get().mode == RunMode.MULTIRUN:
        # further processes would run the whole sweep again
        settings["devices"] = 1
        log.info("a sweep runs its jobs one after the other, on one device each")
    # limits of our own, in `RunLength`
    del settings["max_tokens"], settings["max_time"]
    if settings["max_epochs"] is None:
        settings["max_epochs"] = -1
    plugins: list[Any] = [RunCheckpointIO()]
    if settings["precision"] == "16-mixed":
        # the trainer takes a precision or a plugin for it
        settings["precision"] = None
        plugins.append(LossScaling(hardware.device_type))
    try:
        return pl.Trainer(
            **settings,
            strategy=strategy,
            logger=logger or False,
            callbacks=callbacks,
            plugins=plugins,
            default_root_dir=run.directory,
            use_distributed_sampler=False,
            reload_dataloaders_every_n_epochs=1,
            num_sanity_val_steps=0,
            enable_checkpointing=bool(config.checkpoint.every_n_steps),
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"trainer: {error}") from error
