"""The pages say what works: blocks of all can be read, those of README.md and docs/plugins.md are run.

Run means: the line as it stands, in an empty folder beside a copy of `recipes/` and `scripts/`, through
stand-ins on PATH that make it small. `python recipes/sft.py ...` gets a tiny model and a hundredth of each
number of steps; `pip install` goes to a folder of its own and fetches nothing; `make sft` is the command of
the Makefile's recipe (its set-up is what CI runs).
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from afmoe import CONF_DIRECTORY
from afmoe.conf_tree import config_groups, group_options

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]

PYTHON = """#!/bin/sh
exec {python} {small_recipe} "$@"
"""
PIP = """#!/bin/sh
# `pip install PATH` without the index: what it builds with is here
[ "$1" = install ] && shift
exec {python} -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \\
    --target "$SITE" "$@"
"""
MAKE_SFT = "python recipes/sft.py model=afmoe_mini moe/compute=fp8"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The path in the block's first line, where the block is a file's content."""
        found = re.match(r"# ([\w./-]+\.(?:py|yaml|toml))\n", self.text)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_can_be_read(block: Block) -> None:
    readers: dict[str, Any] = {
        "python": ast.parse,
        "yaml": yaml.safe_load,
        "json": json.loads,
        "toml": tomllib.loads,
        "bash": lambda text: subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20),
        # commands for other machines than this one: read, not run
        "sh": lambda text: subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20),
        # a screen: looked at by `run_page`
        "text": str,
    }
    readers[block.language](block.text)


def commands() -> list[str]:
    lines = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.startswith("python recipes/sft.py")]


# an outside package's options compose where it is installed: in the slow tests
@pytest.mark.parametrize("command", [command for command in commands() if "hydra.searchpath" not in command])
def test_command_composes(command: str) -> None:
    overrides = [word for word in shlex.split(command)[2:] if not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    first_job = [
        f"{override.key_or_group}={next(override.sweep_string_iterator())}"
        if override.is_sweep_override()
        else (override.input_line or "")
        for override in parsed
    ]
    with initialize_config_dir(str(CONF_DIRECTORY), version_base="1.3"):
        assert compose("sft", first_job)


def test_table_lists_every_group_and_every_option() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    table = {group: set(re.findall(r"`(\w+)`", options)) for group, options in rows}
    assert table == {group: set(group_options(group)) for group in config_groups()}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "afmoe|callbacks|conf|docs|recipes|scripts|tests"
    named = re.findall(rf"(?<![\w/])(?:{folders})/[\w/]+\.(?:py|yaml|md)\b", text)
    # int8 is the example of an option that is to be added
    missing = [name for name in named if "int8" not in name and not (ROOT / name).exists()]
    assert not missing


def test_make_sft_runs_the_command_of_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert MAKE_SFT.removeprefix("python ") in makefile.split("\nsft:")[1].split("\n\n")[0]
    assert MAKE_SFT in commands()


def run_page(page: str, folder: Path) -> str:
    """Write the page's files, run its commands, then its Python; returns what they printed."""
    for name in ("recipes", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    programs = {
        "python": PYTHON.format(python=sys.executable, small_recipe=ROOT / "tests" / "small_recipe.py"),
        "pip": PIP.format(python=sys.executable),
        "make": f'#!/bin/sh\n[ "$1" = sft ] && exec {MAKE_SFT}\n',
    }
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "site"),
        "SITE": str(folder / "site"),
        "OMP_WAIT_POLICY": "passive",
        "COLUMNS": "200",
    }

    def run(command: list[str], what: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{what}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    printed, scripts = "", ""
    for block in blocks_of(page):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "bash":
            printed += run(["bash", "-euo", "pipefail", "-c", block.text], str(block))
        elif block.language == "python":
            scripts += block.text
    return printed + run([sys.executable, "-c", scripts], f"Python of {page}")


def finished_runs(folder: Path) -> set[str]:
    found = set()
    for path in folder.rglob("metrics.json"):
        assert json.loads(path.read_text())["status"] == "finished", path
        found.add(str(path.parent.relative_to(folder)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    printed = run_page("README.md", tmp_path)
    outputs = tmp_path / "outputs"
    assert finished_runs(outputs) == {
        "reverse_text-afmoe_mini-fp8",
        "smoke-reverse_text-afmoe_mini-native",
        "chats",
        "second_day",
        "first",
        "first.1",
        "branch",
        "two_ranks",
        "with_plugin",
    }
    assert len(finished_runs(tmp_path / "multirun")) == 4 + 2
    for text in (
        "reverse_text-afmoe_mini-fp8 is finished",
        "continuing outputs/first from step 2",
        "dry run",
    ):
        assert text in printed, text
    # the screens that the page shows have the lines that people see
    screens = [block.text for block in BLOCKS if block.page == "README.md" and block.language == "text"]
    assert len(screens) == 3
    for label in re.findall(r"^([\w./]+) {2,}\S", "".join(screens), re.MULTILINE):
        assert re.search(rf"^{re.escape(label)} {{2,}}\S", printed, re.MULTILINE), label
    (report,) = [
        json.loads(block.text) for block in BLOCKS if block.page == "README.md" and block.language == "json"
    ]
    found = json.loads((outputs / "chats" / "data_report.json").read_text())
    assert report == {name: found[name] for name in report}
    events = EventAccumulator(str(outputs / "with_plugin" / "tensorboard")).Reload()
    assert len(events.Scalars("moe/router_norm/layer_01")) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_on_plugins_runs_from_top_to_bottom(tmp_path: Path) -> None:
    printed = run_page("docs/plugins.md", tmp_path)
    assert finished_runs(tmp_path / "outputs") == {"wide"}
    assert "wide (products in float64)" in printed
