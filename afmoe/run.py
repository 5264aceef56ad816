"""The run folder: who may write to it, where a run continues, and what is said about it.

All of it happens before torch is loaded. Global rank 0 decides once (lock, resume, finished) and hands the
decision on: to the processes that Lightning starts through the environment, to those of torchrun or Slurm
through a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml
from hydra.core.hydra_config import HydraConfig

from afmoe.checkpoint.atomic import disk_errors, write_text
from afmoe.checkpoint.directory import (
    LAST,
    LOCK,
    all_checkpoints,
    checkpoint_step,
    checkpoints_directory,
    damage,
    newest_checkpoint,
    remove_leftovers,
    whole_checkpoints,
)
from afmoe.config import RunConfig
from afmoe.errors import ConfigError, MachineError
from afmoe.finished import is_finished
from afmoe.resume import refuse_changes
from afmoe.run_log import log_name, log_to

log = logging.getLogger(__name__)

_DECISION = "AFMOE_RUN"
_START = time.time()


@dataclass(frozen=True)
class Run:
    """What rank 0 decided about a run folder."""

    directory: Path
    resume_from: Path | None
    """Checkpoint directory that the run continues from; None: a fresh start."""
    resume_step: int
    """Optimizer steps that are already done."""
    finished: bool
    """Nothing is left to do."""

    @property
    def rank(self) -> int:
        return global_rank()

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def global_rank() -> int:
    """This process's number over all nodes, from the variables of Lightning, torchrun or Slurm; 0 alone."""
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ and (name == "RANK" or "SLURM_NTASKS" in os.environ):
            return int(os.environ[name])
    return int(os.environ.get("NODE_RANK", "0")) * 1_000_000 + int(os.environ.get("LOCAL_RANK", "0"))


@contextlib.contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """Take the run folder for the time of the `with` block and decide where the run starts.

    Raises `MachineError` when another process holds the folder and `ConfigError` when what it holds does not
    fit the configuration.
    """
    directory = Path(HydraConfig.get().runtime.output_dir).absolute()
    if global_rank() > 0:
        if config.dry_run:
            # rank 0 says it all
            yield Run(directory, None, 0, True)
            return
        run = _received_decision(directory)
        with log_to(directory / _log_name()):
            yield run
        return
    if config.dry_run:
        # what a start would decide, without a lock and with nothing written
        yield dataclasses.replace(_decide(config, directory), finished=False)
        return
    lock = _lock(directory)
    try:
        if config.resume == "never" and _holds_a_run(directory):
            lock = _move_aside(directory, lock, config.overwrite)
        remove_leftovers(directory)
        _forget_decisions(directory)
        run = _decide(config, directory)
        _hand_on(run)
        if run.finished:
            # its decision stays: nothing tells when the other ranks have read it
            yield run
            return
        try:
            with log_to(directory / _log_name()):
                _say_it_goes_on(directory)
                write_text(directory / "config.yaml", _as_yaml(config))
                yield run
        finally:
            _forget_decisions(directory)
    finally:
        os.environ.pop(_DECISION, None)
        lock.close()


def _log_name() -> str:
    """Where Lightning starts the processes of several nodes, a process knows its number on its node."""
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return log_name(global_rank())
    node = int(os.environ.get("NODE_RANK", "0"))
    return log_name(int(os.environ.get("LOCAL_RANK", "0")), node or None)


def _lock(directory: Path) -> TextIO:
    """Hold the folder. The lock belongs to the open file: it ends with the process, however that ends."""
    with disk_errors(directory):
        file = open(directory / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (it stays open for the whole run)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise MachineError(
            f"{_short(directory)} is in use by {holder}; wait for it, or choose another run_name"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _holds_a_run(directory: Path) -> bool:
    return bool(all_checkpoints(directory)) or (directory / "metrics.json").exists()


def _move_aside(directory: Path, lock: TextIO, overwrite: bool) -> TextIO:
    """Rename an older run folder to `<run_name>.<n>` and start an empty one under its name."""
    if not overwrite:
        raise ConfigError(
            f"{_short(directory)} holds an older run and resume=never; add overwrite=true to move it aside, "
            "choose another run_name, or use resume=auto to continue it"
        )
    number = 1
    while directory.with_name(f"{directory.name}.{number}").exists():
        number += 1
    aside = directory.with_name(f"{directory.name}.{number}")
    directory.rename(aside)
    directory.mkdir()
    fresh = _lock(directory)
    lock.close()
    log.info("the older run was moved to %s", _short(aside))
    return fresh


def _decide(config: RunConfig, directory: Path) -> Run:
    newest = newest_checkpoint(directory)
    if newest is None:
        _refuse_lost_checkpoints(directory)
    if config.resume not in ("auto", "never"):
        wanted = _checkpoint_at(Path(config.resume))
        if newest is None:
            refuse_changes(config, _stored_config(wanted.parent.parent), wanted)
            log.info("starting from %s", _short(wanted))
            return Run(directory, wanted, checkpoint_step(wanted), False)
        # the same command again, after an interruption, continues its own run
        if wanted != newest and started_from(directory) != str(wanted):
            raise ConfigError(
                f"resume={config.resume}: {_short(directory)} already holds a run of its own, at step "
                f"{checkpoint_step(newest)}; choose another run_name, or continue it with resume=auto"
            )
    if newest is None:
        return _decide_without_checkpoint(config, directory)
    step = checkpoint_step(newest)
    refuse_changes(config, _stored_config(directory), newest)
    if _is_finished(config, directory, step):
        log.info(
            "%s is finished at step %d; a larger limit (trainer.max_steps, ...) continues it, "
            "resume=never overwrite=true starts it anew",
            _short(directory),
            step,
        )
        return Run(directory, newest, step, True)
    intact = _newest_intact(directory)
    step = checkpoint_step(intact)
    log.info("continuing %s from step %d", _short(directory), step)
    return Run(directory, intact, step, False)


def _decide_without_checkpoint(config: RunConfig, directory: Path) -> Run:
    finished = _read_json(directory / "metrics.json")
    step = int(finished.get("train/steps", 0))
    # a run of no steps has only validated, and there is nothing to continue
    if finished.get("status") == "finished" and (step or _is_finished(config, directory, step)):
        refuse_changes(config, _stored_config(directory), directory)
        if not _is_finished(config, directory, step):
            raise ConfigError(
                f"{_short(directory)} is finished at step {step} and kept no checkpoint to continue from; "
                "choose another run_name, or start anew with resume=never overwrite=true"
            )
        log.info("%s is finished at step %d", _short(directory), step)
        return Run(directory, None, step, True)
    if (directory / "config.yaml").exists():
        log.warning("no checkpoint in %s yet: starting at step 0", _short(directory))
    return Run(directory, None, 0, False)


def _newest_intact(directory: Path) -> Path:
    """The newest checkpoint of a run whose files are all as they were written; each that is not is named.

    Raises `ConfigError` when none is intact.
    """
    reasons: list[str] = []
    for _, checkpoint in reversed(all_checkpoints(directory)):
        wrong = damage(checkpoint)
        if wrong is None:
            for reason in reasons:
                log.warning("%s; passed over for %s", reason, checkpoint.name)
            return checkpoint
        reasons.append(f"{_short(checkpoint)}: {wrong}")
    raise ConfigError(
        f"no checkpoint of {_short(directory)} is whole, so its run cannot continue: {'; '.join(reasons)}. "
        "Restore the files, or start anew with resume=never overwrite=true"
    )


def _refuse_lost_checkpoints(directory: Path) -> None:
    """Checkpoints that are there and not whole, or gone, are no fresh start."""
    if all_checkpoints(directory):
        _newest_intact(directory)
    last = checkpoints_directory(directory) / LAST
    if last.exists():
        raise ConfigError(
            f"{_short(last)} names {last.read_text(encoding='utf-8').strip()}, and no checkpoint is left. "
            "Restore it, or start anew with resume=never overwrite=true"
        )


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint directory that `resume=PATH` means: itself, or the newest whole one of a run folder."""
    if path.is_file() and path.name == "last":
        path = path.parent / path.read_text(encoding="utf-8").strip()
    if not path.is_dir():
        raise ConfigError(f"resume={path}: no such directory; give a run folder, a checkpoint, auto or never")
    path = path.absolute()
    run = path if (path / "checkpoints").is_dir() else path.parent.parent
    if run == path and all_checkpoints(run):
        return _newest_intact(run)
    if path in [checkpoint for _, checkpoint in whole_checkpoints(run)]:
        wrong = damage(path)
        if wrong is not None:
            raise ConfigError(f"resume={path}: {wrong}; choose another checkpoint of that run")
        return path
    raise ConfigError(
        f"resume={path}: holds no whole checkpoint (a directory step-NNNNNN with the file `complete`); "
        "weights alone are loaded by model.pretrained"
    )


def _stored_config(directory: Path) -> dict[str, Any] | None:
    path = directory / "config.yaml"
    if not path.exists():
        return None
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(path) from error
    if not isinstance(stored, dict):
        raise _unreadable(path)
    return stored


def started_from(directory: Path) -> str | None:
    """The checkpoint of another run that this folder's run began with, by its `run.json`."""
    return _read_json(directory / "run.json").get("started_from")


def _read_json(path: Path) -> dict[str, Any]:
    """What a file of the run folder holds; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unreadable(path) from error
    if not isinstance(content, dict):
        raise _unreadable(path)
    return content


def _unreadable(path: Path) -> ConfigError:
    return ConfigError(f"{_short(path)} cannot be read: it is torn or was edited; delete it and start again")


def _is_finished(config: RunConfig, directory: Path, step: int) -> bool:
    return is_finished(config, _read_json(directory / "metrics.json"), _stored_config(directory), step)


def _say_it_goes_on(directory: Path) -> None:
    """A folder that was finished is not while its run goes on beyond that."""
    values = _read_json(directory / "metrics.json")
    if values.get("status") == "finished":
        text = json.dumps(values | {"status": "running"}, indent=2)
        write_text(directory / "metrics.json", text + "\n")


def _as_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _hand_on(run: Run) -> None:
    text = json.dumps(
        {**dataclasses.asdict(run), "directory": str(run.directory), "resume_from": _text(run.resume_from)}
    )
    os.environ[_DECISION] = text
    launch = _launch_id()
    if launch is not None:
        write_text(run.directory / f".decision-{launch}", text)


def _forget_decisions(directory: Path) -> None:
    for decision in directory.glob(".decision-*"):
        decision.unlink()


def _received_decision(directory: Path, timeout_seconds: float = 300.0) -> Run:
    """Rank 0's decision: from the environment (Lightning's launcher), or from its file (torchrun, Slurm)."""
    text = os.environ.get(_DECISION)
    path = directory / f".decision-{_launch_id()}"
    deadline = time.monotonic() + timeout_seconds
    while text is None:
        # a file of an earlier launch with the same address is older than this process
        if path.exists() and path.stat().st_mtime >= _START - 5.0:
            text = path.read_text(encoding="utf-8")
        elif time.monotonic() > deadline:
            raise MachineError(
                f"rank {global_rank()} heard nothing from rank 0 for {timeout_seconds:.0f} s ({path})"
            )
        else:
            time.sleep(0.1)
    values = json.loads(text)
    values["directory"] = Path(values["directory"])
    values["resume_from"] = Path(values["resume_from"]) if values["resume_from"] else None
    return Run(**values)


def _launch_id() -> str | None:
    """A name for this start of the job that all its processes share; None where Lightning starts them."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        parts = [
            env["TORCHELASTIC_RUN_ID"],
            env.get("MASTER_PORT", ""),
            env.get("TORCHELASTIC_RESTART_COUNT", ""),
        ]
    elif "SLURM_NTASKS" in env and "SLURM_PROCID" in env:
        parts = [
            env.get("SLURM_JOB_ID", ""),
            env.get("SLURM_STEP_ID", ""),
            env.get("SLURM_RESTART_COUNT", ""),
        ]
    else:
        return None
    return "-".join(part for part in parts if part)


def _short(path: Path) -> str:
    """The path from here when it lies below, as people type it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def command_line() -> list[str]:
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
