"""Build the kernels for this processor, once, and load them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from afmoe.errors import MachineError
from afmoe.hardware import c_compiler

SOURCES = {
    "products.c": (),
    # a product and a sum in one instruction would round once where the format's contract rounds twice
    "rounding.c": ("-ffp-contract=off",),
}
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 120


@cache
def load_library() -> ctypes.CDLL:
    """The built kernels. Takes two seconds the first time on a machine, nothing later.

    Raises `MachineError` where they cannot be built or loaded.
    """
    # its OpenMP threads are ours too: the library names no OpenMP of its own
    import torch  # noqa: F401

    compiler = c_compiler()
    if compiler is None:
        raise MachineError("no C compiler was found: install gcc, or set CC (Linux only)")
    path = cache_directory() / f"cpu_kernels-{_fingerprint(compiler)}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
                # a name of its own, then renamed: ranks of one job build at the same time
                _build(compiler, Path(folder)).replace(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MachineError(
            f"the CPU kernels built by {compiler} cannot be kept or loaded ({error}); set XDG_CACHE_HOME to "
            "a folder that holds programs"
        ) from error


def cache_directory() -> Path:
    """`afmoe` in the user's cache: `XDG_CACHE_HOME`, else `~/.cache`."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "afmoe"
    except RuntimeError as error:
        raise MachineError("the CPU kernels need a home directory, or XDG_CACHE_HOME") from error


def _fingerprint(compiler: str) -> str:
    """Of all that the machine code depends on; a home directory may be shared by unlike machines."""
    version = _run([compiler, "--version"])
    parts = [version, platform.machine(), _processor_features(), repr(FLAGS), repr(SOURCES)]
    parts += [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor_features() -> str:
    information = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    # x86 has `flags`, Arm `Features`; the model decides what -march=native tunes for
    return "\n".join(re.findall(r"^(?:flags|Features|model|CPU part)\s*:.*$", information, re.MULTILINE)[:4])


def _build(compiler: str, folder: Path) -> Path:
    objects = []
    for name, flags in SOURCES.items():
        objects.append(str(folder / f"{name}.o"))
        source = str(Path(__file__).parent / name)
        _run([compiler, *FLAGS, *flags, "-c", source, "-o", objects[-1]])
    library = folder / "cpu_kernels.so"
    # without -fopenmp: OpenMP's functions are those of the library that torch has loaded
    _run([compiler, "-shared", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{command[0]} could not build the CPU kernels: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
        raise MachineError(f"{command[0]} could not build the CPU kernels: {first}")
    return done.stdout
