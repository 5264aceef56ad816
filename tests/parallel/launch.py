"""Start several processes of one script as torchrun does, with a free port and a hard limit in time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(script: Path, *arguments: str, world_size: int, timeout_seconds: float) -> None:
    """Run `script` once a rank. Raises `AssertionError` with the output of the first rank that fails.

    Whatever happens, no process is left behind.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        # what Lightning knows torchrun by
        "TORCHELASTIC_RUN_ID": f"test-{port}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_seconds
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() not in (None, 0) for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        outputs = [process.communicate()[0] for process in processes]
    for rank, code in enumerate(codes):
        assert code in (0, None), f"rank {rank} ended with {code}:\n{outputs[rank][-6000:]}"
    assert None not in codes, f"not done in {timeout_seconds} s:\n{outputs[0][-6000:]}"
