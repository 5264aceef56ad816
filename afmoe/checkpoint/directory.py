"""Which checkpoints of a run are whole: the directory side of `checkpoints/step-000100/`, without torch.

A checkpoint is whole when its marker `complete`, written last, names its step and the size of every file in
it. The file `checkpoints/last` tells people the newest whole one; the program goes by the markers, so a
missing or stale `last` does no harm.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from afmoe.checkpoint.atomic import recover, recover_all, remove_directory, write_text
from afmoe.errors import ConfigError

MARKER = "complete"
LAST = "last"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{6,})")


def checkpoints_directory(run_directory: Path | str) -> Path:
    return Path(run_directory) / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(directory: Path) -> int:
    """The step in the name of a checkpoint directory. Raises `ConfigError` for another name."""
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise ConfigError(
            f"{directory}: a checkpoint directory is named after its step, like {checkpoint_name(100)}"
        )
    return int(match[1])


def whole_checkpoints(run_directory: Path | str) -> list[tuple[int, Path]]:
    """Step and directory of every whole checkpoint of a run, oldest first."""
    directory = checkpoints_directory(run_directory)
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    found = [(checkpoint_step(path), path) for path in named]
    return sorted((step, path) for step, path in found if (read_marker(path) or {}).get("step") == step)


def newest_checkpoint(run_directory: Path | str) -> Path | None:
    """The whole checkpoint of the highest step, or None."""
    found = whole_checkpoints(run_directory)
    return found[-1][1] if found else None


def read_marker(directory: Path) -> dict[str, Any] | None:
    """The marker of a whole checkpoint (`step`, `versions`, `files`), or None when it is not whole."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in marker["files"]}
    # a killed or copied-in-part checkpoint lacks the marker, has a torn one, or lacks a file
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None
    return marker if sizes == marker["files"] else None


def write_marker(directory: Path, step: int, versions: dict[str, str]) -> None:
    """Declare the files that now lie in `directory` a whole checkpoint."""
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    marker = {"step": step, "versions": versions, "files": files}
    (directory / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def point_last(directory: Path) -> None:
    """Write the name of a checkpoint to the file `last` beside it."""
    write_text(directory.with_name(LAST), directory.name + "\n")


def prune(run_directory: Path | str, keep_last: int) -> list[Path]:
    """Delete all but the newest `keep_last` whole checkpoints; returns what was deleted."""
    if keep_last < 1:
        raise ConfigError(f"checkpoint.keep_last must be at least 1, got {keep_last}")
    surplus = [path for _, path in whole_checkpoints(run_directory)[:-keep_last]]
    for path in surplus:
        remove_directory(path)
    return surplus


def remove_leftovers(run_directory: Path | str) -> None:
    """Clear what a killed process left in a run directory: unfinished checkpoints, a half-replaced export.

    Only for the process that holds the run's lock: another's unfinished checkpoint looks the same.
    """
    run_directory = Path(run_directory)
    recover(run_directory / "export")
    recover_all(checkpoints_directory(run_directory))


def remove_if_empty(run_directory: Path) -> None:
    """Remove a run folder in which nothing but its lock was ever written."""
    if run_directory.is_dir() and {path.name for path in run_directory.iterdir()} <= {LOCK}:
        (run_directory / LOCK).unlink(missing_ok=True)
        run_directory.rmdir()
