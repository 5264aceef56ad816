"""Files and directories that appear whole or not at all.

New content is written beside its destination under a hidden temporary name, flushed to the disk, then
renamed. What a killed process may leave behind is one of three hidden siblings of `NAME`, and `recover`
knows what each one means:

    .NAME.new    unfinished: removed
    .NAME.old    the version before a replacement: put back if `NAME` is missing, else removed
    .NAME.gone   being deleted: removed

No torch in here: the next start reads the run directory before it imports torch.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afmoe.errors import MachineError

NEW, OLD, GONE = "new", "old", "gone"

# a full disk, a quota, a file-size limit; a forbidden, read-only or broken one; a file where a directory
# should be
_DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
    *(errno.ENOTDIR, errno.EEXIST),
}


@contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; on leaving it becomes `destination`, replacing an older one.

    When the body raises, nothing of it stays and the older one is untouched. A disk that refuses is a
    `MachineError` with the reason. A kill between the two renames is mended by `recover(destination)`.
    """
    destination = Path(os.path.abspath(destination))
    if destination.exists() and not destination.is_dir():
        raise MachineError(f"{destination} is a file, not a directory to write; choose another name")
    temporary = hidden_sibling(destination, NEW)
    with disk_errors(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        recover(destination)
        temporary.mkdir()
        try:
            yield temporary
            flush(temporary)
            _put_in_place(temporary, destination)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def disk_errors(destination: Path) -> Iterator[None]:
    """Turn what a full, read-only or forbidden disk raises into a `MachineError` that names `destination`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise MachineError(
            f"{destination} could not be written: {error.strerror} ({free_space(destination)}); nothing was "
            "changed there. Free some space or choose another place"
        ) from error


def free_space(path: Path) -> str:
    """How much is free on the disk of a path, whether it exists or not."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return f"{shutil.disk_usage(path).free / 2**30:.1f} GiB free on that disk"


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = hidden_sibling(path, NEW)
    with disk_errors(path):
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        os.replace(temporary, path)
        _flush_one(path.parent)


def remove_directory(directory: Path) -> None:
    """Delete a directory so that no moment shows half of it under its own name."""
    gone = hidden_sibling(directory, GONE)
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(directory, gone)
    shutil.rmtree(gone)


def recover(destination: Path) -> None:
    """Clear what a killed process left beside `destination`; put the older version back if it is missing."""
    old = hidden_sibling(destination, OLD)
    if old.exists() and not destination.exists():
        os.rename(old, destination)
    for kind in (NEW, OLD, GONE):
        _remove(hidden_sibling(destination, kind))


def recover_all(directory: Path) -> None:
    """`recover` every destination in `directory` that has something left beside it."""
    if not directory.is_dir():
        return
    for path in list(directory.iterdir()):
        name, _, kind = path.name.rpartition(".")
        if name.startswith(".") and len(name) > 1 and kind in (NEW, OLD, GONE):
            recover(directory / name[1:])


def hidden_sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def flush(path: Path) -> None:
    """Force a file, or a directory and all in it, from memory to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            flush(child)
    _flush_one(path)


def _put_in_place(temporary: Path, destination: Path) -> None:
    old = hidden_sibling(destination, OLD)
    if destination.exists():
        os.rename(destination, old)
    os.rename(temporary, destination)
    _flush_one(destination.parent)
    _remove(old)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
