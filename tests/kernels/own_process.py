"""Kernels are tried in processes of their own: triton interprets or compiles, and a process does only one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
TRITON = "3.9.0"


def skip_without_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; `make test-all` installs it on Linux")
    if version("triton") != TRITON:
        pytest.skip(f"the interpreter's repairs are written for triton {TRITON}, this is {version('triton')}")


def printed_json(script: str, *arguments: str, interpret: bool) -> Any:
    """What `python tests/kernels/SCRIPT ARGUMENTS` prints, run once; a warning in it is an error."""
    done = _run(script, *arguments, interpret=interpret)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def _run(script: str, *arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    # an empty cache: what an earlier run compiled would hide that a kernel no longer compiles
    with tempfile.TemporaryDirectory(prefix="triton-") as cache_directory:
        return subprocess.run(
            [sys.executable, "-W", "error", str(FOLDER / script), *arguments],
            env=environment | {"TRITON_CACHE_DIR": cache_directory},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
