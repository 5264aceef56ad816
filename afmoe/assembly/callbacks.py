"""What happens beside the steps: the chosen callbacks, and those of every run."""

from __future__ import annotations

import functools

from lightning.pytorch.callbacks import Callback, LearningRateMonitor

from afmoe.config import RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.fault_record import save_fault
from afmoe.registry import build, configure
from afmoe.run import Run
from afmoe.signals import StopSignals
from callbacks.gather_steps import GatherSteps
from callbacks.initial_validation import InitialValidation
from callbacks.loss_scale import LossScale
from callbacks.moe_callback import refuse_contradictions
from callbacks.parameter_groups import ParameterGroups
from callbacks.planned_rate import PlannedRate
from callbacks.progress import Progress
from callbacks.record_steps import RecordSteps
from callbacks.run_length import RunLength
from callbacks.run_metrics import RunMetrics
from callbacks.save_checkpoints import SaveCheckpoints
from callbacks.skip_bad_steps import SkipBadSteps
from callbacks.stop_on_signal import StopOnSignal
from callbacks.text_samples import TextSamples
from callbacks.throughput import Throughput


def make_callbacks(
    config: RunConfig, run: Run, data: AfmoeDataModule, signals: StopSignals
) -> list[Callback]:
    """The clock, the chosen callbacks, then those of every run."""
    throughput, steps = Throughput(), GatherSteps()
    callbacks: list[Callback] = [throughput]
    callbacks += [build(configure("callbacks", section)) for section in config.callbacks.values()]
    refuse_contradictions(callbacks)
    callbacks += [steps, RunMetrics(steps), RecordSteps(run.directory, steps), ParameterGroups()]
    if config.logger.get("enabled", True):
        callbacks += [LearningRateMonitor(logging_interval="step"), PlannedRate()]
        if config.samples.count:
            callbacks.append(TextSamples(data, config.samples.count, config.samples.max_new_tokens))
    if config.trainer.enable_progress_bar:
        callbacks.append(Progress(throughput))
    if config.trainer.precision == "16-mixed":
        callbacks.append(LossScale())
    length = RunLength(config.trainer.max_time, config.trainer.max_tokens, throughput)
    bad_steps = SkipBadSteps(
        config.faults.max_skipped_steps, functools.partial(save_fault, config, run.directory)
    )
    saver = SaveCheckpoints(run, config.checkpoint) if config.checkpoint.every_n_steps else None
    # the last but the writer of checkpoints: what the others count belongs to a checkpoint that it asks for
    initial = InitialValidation(last_counts=config.checkpoint.best_metric is not None)
    callbacks += [initial, length, bad_steps, StopOnSignal(signals, saver)]
    return callbacks if saver is None else [*callbacks, saver]
