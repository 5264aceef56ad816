"""Build the kernels for this processor, once, and load them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from afmoe.errors import MachineError
from afmoe.hardware import c_compiler, c_compiler_remedy

log = logging.getLogger(__name__)

SOURCES = {
    "products.c": (),
    # a product and a sum in one instruction would round once where the format's contract rounds twice
    "rounding.c": ("-ffp-contract=off",),
}
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_BUILD_SECONDS, _ANSWER_SECONDS = 120, 20
_BUILDING = "building-"
_DIGEST = hashlib.sha256().digest_size


def load_library() -> ctypes.CDLL:
    """The built kernels. Takes two seconds the first time on a machine, nothing later.

    Raises `MachineError` where they cannot be built or loaded.
    """
    loaded = _load_once()
    if isinstance(loaded, MachineError):
        raise MachineError(str(loaded)) from loaded
    return loaded


@cache
def _load_once() -> ctypes.CDLL | MachineError:
    """A compiler that fails, or hangs, is asked once and not for each layer."""
    try:
        return load_or_build()
    except MachineError as error:
        return error


def load_or_build() -> ctypes.CDLL:
    """Each call anew; otherwise as `load_library`."""
    # its OpenMP threads are ours too: the library names no OpenMP of its own
    import torch  # noqa: F401

    compiler = c_compiler()
    if compiler is None:
        raise MachineError(f"no C compiler was found: {c_compiler_remedy()}")
    try:
        path = cache_directory() / f"cpu_kernels-{_fingerprint(compiler)}.so"
        if path.is_file():
            if _is_whole(path):
                return _load(compiler, path)
            log.warning("%s is damaged: it is built anew", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_broken_off_builds(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_BUILDING) as folder:
            # a name of its own, then renamed: ranks of one job build at the same time
            built = _build(compiler, Path(folder))
            library = _load(compiler, built)
            built.replace(path)
        return library
    except OSError as error:
        raise MachineError(
            f"the CPU kernels built by {compiler[0]} cannot be kept ({error}); set XDG_CACHE_HOME to "
            "a folder that holds programs"
        ) from error


def cache_directory() -> Path:
    """`afmoe` in the user's cache: `XDG_CACHE_HOME` where it is an absolute path, else `~/.cache`."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (wanted if wanted.is_absolute() else Path.home() / ".cache") / "afmoe"
    except RuntimeError as error:
        raise MachineError("the CPU kernels need a home directory, or XDG_CACHE_HOME") from error


def _load(compiler: list[str], path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # clang calls another OpenMP than the one that torch brings
        is_foreign = "undefined symbol" in str(error)
        remedy = "set CC=gcc" if is_foreign else "set XDG_CACHE_HOME to a folder that holds programs"
        raise MachineError(
            f"the CPU kernels built by {compiler[0]} cannot be loaded ({error}); {remedy}"
        ) from error


def _is_whole(path: Path) -> bool:
    """Whether a kept library ends with the digest of what stands before: a part of one kills who loads it."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _remove_broken_off_builds(folder: Path) -> None:
    """What killed processes have left; nobody builds for as long as that."""
    for left in folder.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 10 * _BUILD_SECONDS:
                shutil.rmtree(left)


def _fingerprint(compiler: list[str]) -> str:
    """Of all that the machine code depends on; a home directory may be shared by unlike machines."""
    version = _run([*compiler, "--version"], seconds=_ANSWER_SECONDS)
    parts = [version, *compiler[1:], platform.machine(), _processor_features(), repr(FLAGS), repr(SOURCES)]
    parts += [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor_features() -> str:
    information = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    # x86 has `flags`, Arm `Features`; the model decides what -march=native tunes for
    return "\n".join(re.findall(r"^(?:flags|Features|model|CPU part)\s*:.*$", information, re.MULTILINE)[:4])


def _build(compiler: list[str], folder: Path) -> Path:
    objects = []
    for name, flags in SOURCES.items():
        objects.append(str(folder / f"{name}.o"))
        source = str(Path(__file__).parent / name)
        _run([*compiler, *FLAGS, *flags, "-c", source, "-o", objects[-1]])
    library = folder / "cpu_kernels.so"
    # without -fopenmp: OpenMP's functions are those of the library that torch has loaded
    _run([*compiler, "-shared", *objects, "-o", str(library)])
    with library.open("rb+") as file:
        file.write(hashlib.sha256(file.read()).digest())
    return library


def _run(command: list[str], seconds: float = _BUILD_SECONDS) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # what it says is quoted, in whatever encoding its paths are
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"{command[0]} has not answered within {seconds:g} seconds") from error
    except OSError as error:
        raise MachineError(f"{command[0]} could not build the CPU kernels: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        said = " ".join(first.split())[:300] or f"exit code {done.returncode}"
        raise MachineError(f"{command[0]} could not build the CPU kernels: {said}")
    return done.stdout
