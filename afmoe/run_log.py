"""The log files of a run folder: `sft.log` of rank 0, `sft.rank-1.log` and so on of the others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write what is logged in the block to `path` too, and the trace of what ends it."""
    handler = _RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    except BaseException as error:
        # into the file only: the screen shows it anyway
        message = f"ended by {type(error).__name__}"
        handler.handle(
            logging.getLogger(__name__).makeRecord(
                __name__, logging.ERROR, __file__, 0, message, (), sys.exc_info()
            )
        )
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        # what could not be written is still in its buffer
        with suppress(OSError):
            handler.close()


class _RunLog(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: a full disk is told by what the run has to write next, once and in one line."""


def log_name(rank: int, node: int | None = None) -> str:
    """`node`: where processes know their number within a node only."""
    where = "" if node is None else f"node-{node}-"
    return "sft.log" if rank == 0 and not node else f"sft.{where}rank-{rank}.log"
