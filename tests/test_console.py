"""What reaches the console."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from afmoe.console import quiet_libraries
from afmoe.moe.compute.cpu_choice import say_once


@pytest.mark.parametrize(
    ("variables", "shown"), [({}, 1), ({"LOCAL_RANK": "1"}, 0), ({"SLURM_LOCALID": "3"}, 0)]
)
def test_what_all_processes_of_a_machine_say_alike_is_shown_by_one_and_kept_by_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], shown: int
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    console = ListHandler()
    file = logging.FileHandler(tmp_path / "sft.log")
    monkeypatch.setattr(logging.getLogger(), "handlers", [console, file])
    quiet_libraries()
    say_once.cache_clear()

    for _ in range(2):
        say_once("moe/compute=fp8 is emulated")
    logging.getLogger("afmoe").warning("this process alone")

    assert console.messages == ["moe/compute=fp8 is emulated"] * shown + ["this process alone"]
    file.close()
    assert Path(file.baseFilename).read_text().splitlines() == [
        "moe/compute=fp8 is emulated",
        "this process alone",
    ]


class ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
