"""Marker files: what a directory says of its own layout, beside what its keys say.

    conversion.json   ours, written last by a conversion: layout, dtype, source, versions
    .prime-v1         prime-rl's, in its converted caches since pull request 3411; empty. With it a cache is
                      canonical, without it `prime`, and prime-rl refuses a directory `prime` that lacks it

Keys decide: they are what is loaded. A marker that contradicts them is an error, since one of the two is a
lie and nothing tells which.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from afmoe.checkpoint.config_file import read_json, write_json
from afmoe.checkpoint.layouts import detect_layout
from afmoe.errors import ConfigError

log = logging.getLogger(__name__)

CONVERSION = "conversion.json"
PRIME_MARKER = ".prime-v1"
VERSION = 1


def directory_layout(directory: Path, keys: Iterable[str]) -> str:
    """The layout of the weights in `directory`, which hold `keys`.

    Raises `ConfigError` when no layout fits, or when a marker says another one than the keys.
    """
    keys = list(keys)
    layout = detect_layout(keys)
    # layers without experts are the same everywhere: then the marker has nothing to contradict
    has_experts = any(".mlp.experts." in key for key in keys)
    has_prime_marker = (directory / PRIME_MARKER).is_file()
    said = {PRIME_MARKER: "canonical"} if has_prime_marker else {}
    conversion = read_conversion(directory)
    if conversion is not None:
        said[CONVERSION] = str(conversion.get("layout"))
    for marker, promised in said.items():
        if has_experts and promised != layout:
            raise ConfigError(
                f"{directory / marker} says layout {promised}, but the weights' keys are {layout}; "
                "delete the marker if the weights are what you want, else convert again"
            )
    if layout == "canonical" and directory.name == "prime" and not said:
        log.warning(
            "%s looks like a cache of prime-rl, but has no %s: its conversion may not have finished",
            directory,
            PRIME_MARKER,
        )
    return layout


def read_conversion(directory: Path) -> dict[str, Any] | None:
    """What `conversion.json` says; None without one."""
    path = directory / CONVERSION
    return read_json(path) if path.is_file() else None


def write_markers(directory: Path, layout: str, dtype: str, source: Path, source_layout: str) -> None:
    """Write both kinds of marker. Call it last: they say that everything else is there."""
    if layout == "canonical":
        (directory / PRIME_MARKER).touch()
    write_json(
        directory / CONVERSION,
        {
            "version": VERSION,
            "layout": layout,
            "dtype": dtype,
            "source": str(source.resolve()),
            "source_layout": source_layout,
            "afmoe_recipe": version("afmoe-recipe"),
        },
    )
