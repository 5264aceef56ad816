"""Memory and disk that are full, or a rank that is gone, said as one line: how much is used and free, and
which settings to change.

Loads no torch: where torch ran out of memory it is loaded already.
"""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from afmoe.checkpoint.atomic import free_space
from afmoe.config import RunConfig
from afmoe.endings import EndedByAnother, is_peer_lost
from afmoe.errors import MachineError
from afmoe.run import global_rank

_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_GIB = 2**30


@contextlib.contextmanager
def explained_faults(config: RunConfig, directory: Path) -> Iterator[None]:
    """Turn memory or disk that ran out in the block, or a rank that is gone, into a `MachineError`.

    `directory` is the run's.
    """
    before = threading.excepthook
    threading.excepthook = _quiet_about_disks
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MachineError(out_of_memory(error, config)) from error
        if error.errno not in _DISK_IS_FULL:
            raise
        raise MachineError(
            f"{error.filename or directory} could not be written: {error.strerror} "
            f"({free_space(directory)}); whole checkpoints stay as they are. Free some space or move the run "
            "folder, then start again"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if is_peer_lost(error):
            if global_rank() > 0:
                raise EndedByAnother(agreed=False) from error
            raise MachineError(
                "another process of this run ended while this one waited for it: why is said above, or in "
                f"the files {directory}/sft.*rank-*.log; a process that was killed, by the system for its "
                "memory say, says nothing"
            ) from error
        if not is_out_of_memory(error):
            raise
        raise MachineError(out_of_memory(error, config)) from error
    finally:
        threading.excepthook = before


def _quiet_about_disks(arguments: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread raises what it met for the screen, and hands it to the next who logs."""
    error = arguments.exc_value
    if not (isinstance(error, OSError) and error.errno in _DISK_IS_FULL):
        threading.__excepthook__(arguments)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has a class for GPUs and only a message for CPUs."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_gpu or isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def out_of_memory(error: BaseException, config: RunConfig) -> str:
    """The line about it. Called while what filled the memory is still there."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info()
        used = torch.cuda.memory_allocated()
        state = (
            f"this process holds {_gib(used)} in tensors and {_gib(torch.cuda.memory_reserved() - used)} in "
            f"reserve, {_gib(free)} of {_gib(total)} are free"
        )
        where = "on the GPU"
    else:
        state, where = _host_memory(), "on the CPU"
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ (?:bytes|[KMG]iB))", str(error))
    wanted = f" for {_readable(asked[1])} more" if asked else ""
    data = config.data
    return (
        f"out of memory {where}{wanted}: {state}. Lower data.batch_size={data['batch_size']} and raise "
        f"trainer.accumulate_grad_batches={config.trainer.accumulate_grad_batches} by as much, lower "
        f"data.sequence_length={data['sequence_length']}, or set memory.activation_checkpointing=full, or a "
        "smaller memory.loss_chunk_tokens"
    )


def _host_memory() -> str:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    text = f"this process has used up to {_gib(used)}"
    information = Path("/proc/meminfo")
    if information.is_file():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", information.read_text(encoding="utf-8"), re.MULTILINE)
        text += f", {_gib(int(found[1]) * 1024)} are free" if found else ""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return text if limit == resource.RLIM_INFINITY else f"{text}; its limit (ulimit -v) is {_gib(limit)}"


def _readable(size: str) -> str:
    number, unit = size.split()
    return _gib(int(number)) if unit == "bytes" else size


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"
