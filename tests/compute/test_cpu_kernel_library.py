"""The library of the kernels in C: built once, kept whole, and what cannot be built is named."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expert_cases import needs_compiler

from afmoe.errors import MachineError
from afmoe.hardware import c_compiler
from afmoe.moe.cpu_kernels import library

pytestmark = needs_compiler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "afmoe"


def compiler_script(folder: Path, text: str) -> str:
    path = folder / "some-cc"
    path.write_bytes(b"#!/bin/sh\n" + text.encode("latin-1") + b"\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'x.c:1: error: no such machine' >&2; exit 1", "could not build.*no such machine"),
        (
            "printf 'kaputt: \xe4\n  ganz\n' >&2; exit 1",
            "could not build the CPU kernels: kaputt: \ufffd ganz$",
        ),
        ("exit 3", "could not build the CPU kernels: exit code 3$"),
        ("exec sleep 30", "has not answered within 0.2 seconds"),
    ],
    ids=["error", "other words and bytes", "nothing said", "hangs"],
)
def test_a_compiler_that_cannot_build_is_named_with_what_it_said_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("CC", compiler_script(tmp_path, text))
    monkeypatch.setattr(library, "_ANSWER_SECONDS", 0.2 if "sleep" in text else 20)
    with pytest.raises(MachineError, match=f"some-cc {said}"):
        library.load_or_build()
    assert not cache.exists() or not [*cache.iterdir()]


def test_a_library_that_cannot_be_loaded_is_named_with_what_to_do(tmp_path: Path) -> None:
    # what clang makes of OpenMP's pragmas
    source, built = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text("void __kmpc_fork_call(void); void f(void) { __kmpc_fork_call(); }")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    with pytest.raises(
        MachineError, match=r"built by clang cannot be loaded .*__kmpc_fork_call\); set CC=gcc$"
    ):
        library._load(["clang"], built)
    with pytest.raises(MachineError, match=r"cannot be loaded .*set XDG_CACHE_HOME to a folder that"):
        library._load(["gcc"], source)


def test_a_compiler_that_fails_is_asked_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", compiler_script(tmp_path, f"echo called >>{calls}; exit 1"))
    monkeypatch.setattr(library, "_load_once", functools.cache(library._load_once.__wrapped__))
    for _ in range(3):
        with pytest.raises(MachineError, match="exit code 1"):
            library.load_library()
    assert calls.read_text() == "called\n"


def test_a_compiler_may_have_options_and_one_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "env gcc -g0")
    compiler = c_compiler()
    assert compiler is not None
    assert [Path(compiler[0]).name, *compiler[1:]] == ["env", "gcc", "-g0"]
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MachineError, match="no C compiler was found: CC=no-such-compiler is no program"):
        library.load_or_build()


def test_a_cache_that_cannot_be_written_is_named(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(MachineError, match=f"cannot be kept.*{tmp_path}.*set XDG_CACHE_HOME"):
        library.load_or_build()


def test_a_relative_cache_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (".", "cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert library.cache_directory() == tmp_path / ".cache" / "afmoe"


def test_a_damaged_library_is_built_anew_and_what_killed_builds_left_is_removed(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # built quickly: nothing is multiplied
    monkeypatch.setattr(library, "FLAGS", ("-std=gnu11", "-O0", "-fPIC", "-fopenmp"))
    left, under_way = cache / "building-killed", cache / "building-now"
    for folder in (left, under_way):
        folder.mkdir(parents=True)
        (folder / "products.c.o").write_text("half")
    os.utime(left, (0, 0))

    library.load_or_build()
    assert not caplog.messages
    (built,) = cache.glob("*.so")
    whole = built.read_bytes()
    assert not left.exists()
    assert under_way.exists()
    # loading a part of it ends the process with SIGBUS
    built.unlink()
    built.write_bytes(whole[:20_000])

    library.load_or_build()
    assert caplog.messages == [f"{built} is damaged: it is built anew"]
    assert library._is_whole(built)


@pytest.mark.slow
def test_processes_that_build_at_the_same_time_share_one_library(tmp_path: Path) -> None:
    program = (
        "from afmoe.moe.cpu_kernels.kernels import cpu_kernels; import torch; x = torch.ones(2, 2); "
        "cpu_kernels().multiply(x, x[None], torch.tensor([[0, 0, 2]]), out_RN=x.clone())"
    )
    command = ["env", f"XDG_CACHE_HOME={tmp_path}", sys.executable, "-c", program]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    (built,) = (tmp_path / "afmoe").iterdir()
    written = built.stat().st_mtime_ns
    subprocess.run(command, check=True, timeout=60)
    assert built.stat().st_mtime_ns == written
