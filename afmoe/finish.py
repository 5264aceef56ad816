"""The files of a run beside its checkpoints: `run.json` and `data_report.json` at the start, `metrics.json`
and `export/` at the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from afmoe.checkpoint.atomic import write_text
from afmoe.checkpoint.directory import newest_checkpoint
from afmoe.checkpoint.export import export_run
from afmoe.config import RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.endings import is_agreed, is_peer_lost
from afmoe.errors import MachineError
from afmoe.logger.one_file import OneFileLogger
from afmoe.module import AfmoeModule
from afmoe.parallel.deepspeed import gathered_tensors
from afmoe.run import Run, command_line, started_from
from callbacks.run_metrics import RunMetrics, callback_of, write_metrics

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 10.0

_PACKAGES = (
    "torch",
    "lightning",
    "deepspeed",
    "transformers",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "numpy",
    "afmoe-recipe",
)


def record_start(config: RunConfig, run: Run, data: AfmoeDataModule) -> None:
    """Write `data_report.json` and `run.json`: command line, versions, and hashes of what the result depends
    on.
    """
    if not run.is_main:
        return
    write_text(run.directory / "data_report.json", json.dumps(data.report, indent=2) + "\n")
    # `load_tokenizer` refuses any other kind
    fast_tokenizer: Any = data.tokenizer.backend_tokenizer
    config_text = (run.directory / "config.yaml").read_text(encoding="utf-8")
    own = run.resume_from is None or run.resume_from.is_relative_to(run.directory)
    record = {
        "command": command_line(),
        "started_from": started_from(run.directory) if own else str(run.resume_from),
        "resumed_at_step": run.resume_step,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "hashes": {
            "config": _sha256(config_text.encode()),
            "training_data": data.train_split.fingerprint,
            "validation_data": data.validation_split.fingerprint,
            "tokenizer": _sha256(fast_tokenizer.to_str().encode()),
        },
    }
    write_text(run.directory / "run.json", json.dumps(record, indent=2) + "\n")


@contextmanager
def stopped_early(run: Run, trainer: pl.Trainer) -> Iterator[None]:
    """Leave a `metrics.json` that says so when the run ends with an error or a signal.

    However it ends, the ranks that this process started end before it.
    """
    try:
        yield
    except BaseException as error:
        # figures are sums over the ranks: without an agreed end the others are not there to take part
        if trainer.world_size == 1 or is_agreed(error):
            newest = newest_checkpoint(run.directory)
            if run.is_main:
                log.warning(
                    "stopped at step %d; the same command continues from %s",
                    trainer.global_step,
                    "the start: no checkpoint was written yet" if newest is None else newest.name,
                )
            status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
            try:
                write_metrics(run.directory / "metrics.json", trainer, status)
            except MachineError as second:
                # what ended the run is the news, a full disk has more than one victim
                log.warning("%s", second)
        else:
            _end_started_ranks(trainer, error)
        # a full disk: told by what the run had to write first
        with suppress(OSError):
            _close_logger(trainer, "failed")
        raise
    finally:
        _await_started_ranks(trainer)


def _await_started_ranks(trainer: pl.Trainer) -> None:
    """Let the ranks that Lightning started end first: whoever waits for this process may start the run again,
    or take the devices.
    """
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    for process in _taken_from_lightning(trainer):
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _taken_from_lightning(trainer: pl.Trainer) -> list[subprocess.Popen[bytes]]:
    """The ranks that Lightning started from this process, none if they were taken before. It no longer
    watches them: as soon as one ends with an error it would kill this process too.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return []
    started = list(launcher.procs)
    launcher.procs.clear()
    return started


def _end_started_ranks(trainer: pl.Trainer, error: BaseException) -> None:
    """Kill the ranks that Lightning started from this process, before this one leaves them: each would find
    the connection closed, with a trace, or wait for its time limit.
    """
    started = _taken_from_lightning(trainer)
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    # one of them ended by itself, and has yet to say why
    while is_peer_lost(error) and time.monotonic() < deadline:
        if any(process.poll() is not None for process in started):
            break
        time.sleep(0.1)
    for process in started:
        process.kill()
        process.wait()


def finish(
    config: RunConfig,
    run: Run,
    trainer: pl.Trainer,
    module: AfmoeModule,
    data: AfmoeDataModule,
) -> dict[str, Any]:
    """Validate the last weights, export them, write `metrics.json`; returns what it holds.

    `metrics.json` comes last: `finished` means that everything else is there.
    """
    validated_step = callback_of(trainer, RunMetrics).validated_step
    if validated_step != trainer.global_step and len(data.validation_split):
        trainer.validate(module, data, verbose=False)
    if config.export.enabled and not trainer.global_step:
        if run.is_main:
            log.warning("no step was trained, so nothing is exported")
    elif config.export.enabled:
        _export(config, run, trainer, module, data)
    values = write_metrics(run.directory / "metrics.json", trainer, "finished")
    _close_logger(trainer, "success")
    return values


def _close_logger(trainer: pl.Trainer, status: str) -> None:
    if trainer.logger is not None:
        trainer.logger.finalize(status)
    if isinstance(trainer.logger, OneFileLogger):
        trainer.logger.close()


def _export(
    config: RunConfig, run: Run, trainer: pl.Trainer, module: AfmoeModule, data: AfmoeDataModule
) -> None:
    tensors = gathered_tensors(trainer.strategy, module.model)
    if trainer.is_global_zero:
        export_run(
            module.model,
            data.tokenizer,
            run.directory / "export",
            layout=config.export.layout,
            end_of_turn_id=data.renderer.end_of_turn_id,
            tensors=tensors,
        )
    elif tensors is not None:
        tensors.take_part()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
