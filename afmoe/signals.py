"""What SIGTERM, SIGUSR1 and SIGINT do to a run: it ends with its state saved and a code that says so.

While training goes on a signal is only noted; the callback `StopOnSignal` looks at the note at the end of
each optimizer step. Anywhere else (set-up, the last validation, the export) the run ends where it is: what it
writes there appears whole or not at all.

    SIGTERM, SIGUSR1   a scheduler takes the machine back: saved, exit code 75 ("resume me")
    SIGINT once        Ctrl-C: saved, exit code 130
    SIGINT twice       the process dies at once, as by SIGKILL; checkpoints stay whole
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

# EX_TEMPFAIL of sysexits.h: try the same command again
RESUME_ME = 75
BY_HAND = 130

_ASKED_AGAIN_SECONDS = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupted(SystemExit):
    """The run ends because a signal asked for it.

    Lightning's launcher kills every process as soon as one of the others ends with a code, so that only rank
    0 carries it.
    """

    def __init__(self, number: int, rank: int, *, agreed: bool = False) -> None:
        code = BY_HAND if number == signal.SIGINT else RESUME_ME
        super().__init__(code if rank == 0 else 0)
        self.name = signal.Signals(number).name
        self.agreed = agreed
        """All ranks end at the same step, so that they can still talk to each other."""


class StopSignals:
    """The signals of this process: which one came, and whether it ends the run at once or at a step's end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._process = os.getpid()
        self.received: int | None = None
        self.waits = False
        """Someone looks at `received` and ends the run in good order; else the handler ends it."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if os.getpid() != self._process:
            # a forked loader of data: Ctrl-C reaches it too, and its run ends it
            return
        if not self.waits and _is_importing(frame):
            # C++ may have asked for the import, and an exception that meets it there aborts the process
            again = threading.Timer(_ASKED_AGAIN_SECONDS, os.kill, (self._process, number))
            again.daemon = True
            again.start()
            return
        if number == signal.SIGINT:
            # the next one is not ours to see: it works while a library call holds the interpreter, too
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.received is not None:
            return
        self.received = number
        name = signal.Signals(number).name
        if self.waits:
            again = "; once more ends it at once" if number == signal.SIGINT else ""
            self._say(f"{name}: the running step is finished and saved{again}")
        else:
            self._say(f"{name}: the run ends here")
            raise Interrupted(number, self.rank)

    def install(self) -> None:
        """Take the signals, also where a library took them since."""
        for number in _SIGNALS:
            if not (number == signal.SIGINT and self.received == signal.SIGINT):
                signal.signal(number, self)

    def stop(self, number: int | None = None, *, agreed: bool = False) -> None:
        """End the run, for the signal that came here or, by its number, to another rank."""
        if self.received is None and number is not None:
            self._say(
                f"{signal.Signals(number).name} came to another process of the run: it is saved and ends"
            )
        self.received = number = self.received or number or signal.SIGTERM
        raise Interrupted(number, self.rank, agreed=agreed)

    def _say(self, text: str) -> None:
        """Once a run: a signal that comes to all ranks, or to another one, is rank 0's to tell."""
        if self.rank == 0:
            log.warning("%s", text)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is running anywhere below `frame`."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def stop_signals(rank: int) -> Iterator[StopSignals]:
    """Hold the signals for the time of the `with` block; outside the main thread there are none to hold."""
    signals = StopSignals(rank)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    signals.install()
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
