"""Lightning's trainer, from the settings of `trainer`, strategy and logger."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback

from afmoe.checkpoint.lightning_io import RunCheckpointIO
from afmoe.config import RunConfig
from afmoe.errors import ConfigError
from afmoe.hardware import Hardware
from afmoe.optim.loss_scaling import LossScaling
from afmoe.parallel.deepspeed import choose_accelerator
from afmoe.registry import build, configure
from afmoe.run import Run

log = logging.getLogger(__name__)


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
