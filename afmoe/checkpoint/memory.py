"""How much memory is free, so that what does not fit is refused before it is read."""

from __future__ import annotations

import os
from pathlib import Path

from afmoe.errors import MachineError

# limit and use of a container's group: version 2, then version 1
# (https://docs.kernel.org/admin-guide/cgroup-v2.html)
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_rss"),
)


def check_memory(what: str, needed_bytes: int) -> None:
    """Raises `MachineError` with both figures when `needed_bytes` of memory are not free."""
    available = available_memory_bytes()
    if available is not None and needed_bytes > available:
        raise MachineError(
            f"{what} needs {needed_bytes / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free; "
            "choose a smaller dtype or a larger machine"
        )


def available_memory_bytes() -> int | None:
    """Memory to be had without swapping, within the container's limit; None where nothing tells."""
    figures = [_group_bytes(*group) for group in _GROUPS]
    meminfo = _table(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        figures.append(meminfo["MemAvailable:"] * 1024)
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        figures.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((figure for figure in figures if figure is not None), default=None)


def _group_bytes(limit_path: str, stat_path: str, used: str) -> int | None:
    """What the group may still take; None without such a group or without a limit ("max")."""
    path = Path(limit_path)
    limit = path.read_text().strip() if path.is_file() else "max"
    return int(limit) - _table(Path(stat_path)).get(used, 0) if limit.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """The lines `name number ...` of a file of the kernel's; empty where there is no such file."""
    if not path.is_file():
        return {}
    rows = [line.split() for line in path.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
