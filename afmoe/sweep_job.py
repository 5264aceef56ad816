"""A job of a sweep that needs several processes: a command of its own, one after the other.

Lightning starts further processes by running the script again, which in a sweep would be the whole sweep.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from afmoe.config import RunConfig
from afmoe.errors import MachineError
from afmoe.signals import BY_HAND, RESUME_ME


def needs_own_command(config: RunConfig) -> bool:
    """Whether this is a job of a sweep with several processes."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return False
    devices = config.trainer.devices
    num_devices = len(devices) if isinstance(devices, list) else devices
    return config.trainer.num_nodes > 1 or (num_devices != "auto" and num_devices > 1)


def run_own_command() -> float | None:
    """Run the job in its folder; its held-out loss.

    Raises `MachineError` when it fails, and `SystemExit` with its code when a signal ended it.
    """
    settings = HydraConfig.get()
    directory = Path(settings.runtime.output_dir).absolute()
    # what else was said to Hydra belongs to the sweep
    kept = [one for one in settings.overrides.hydra if one.lstrip("+").startswith("hydra.searchpath")]
    command = [sys.executable, sys.argv[0], *settings.overrides.task, *kept, f"hydra.run.dir={directory}"]
    process = subprocess.Popen(command)
    with _handed_on(process):
        code = process.wait()
    if code in (RESUME_ME, BY_HAND):
        # the job has saved its state, and the sweep ends as it does
        raise SystemExit(code)
    if code:
        raise MachineError(
            f"job {settings.job.num} of the sweep ended with exit code {code}, see {directory}"
        )
    metrics = directory / "metrics.json"
    return json.loads(metrics.read_text(encoding="utf-8")).get("val/loss") if metrics.is_file() else None


@contextmanager
def _handed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave the signals that come meanwhile to the job, and its end to the caller."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hand_on(number: int, frame: object) -> None:
        # Ctrl-C goes to both, and a second one would end the job without saving
        if number != signal.SIGINT:
            process.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
