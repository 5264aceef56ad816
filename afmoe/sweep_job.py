"""A job of a sweep that needs several processes: a command of its own, one after the other.

Lightning starts further processes by running the script again, which in a sweep would be the whole sweep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from afmoe.config import RunConfig
from afmoe.errors import MachineError


def needs_own_command(config: RunConfig) -> bool:
    """Whether this is a job of a sweep with several processes."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return False
    devices = config.trainer.devices
    num_devices = len(devices) if isinstance(devices, list) else devices
    return config.trainer.num_nodes > 1 or (num_devices != "auto" and num_devices > 1)


def run_own_command() -> float | None:
    """Run the job in its folder; its held-out loss. Raises `MachineError` when it fails."""
    settings = HydraConfig.get()
    directory = Path(settings.runtime.output_dir).absolute()
    # what else was said to Hydra belongs to the sweep
    kept = [one for one in settings.overrides.hydra if one.lstrip("+").startswith("hydra.searchpath")]
    command = [sys.executable, sys.argv[0], *settings.overrides.task, *kept, f"hydra.run.dir={directory}"]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise MachineError(
            f"job {settings.job.num} of the sweep ended with exit code {code}, see {directory}"
        )
    metrics = directory / "metrics.json"
    return json.loads(metrics.read_text(encoding="utf-8")).get("val/loss") if metrics.is_file() else None
