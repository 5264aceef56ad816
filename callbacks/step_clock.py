"""Where the time of a step goes, without waiting for the device inside the step."""

from __future__ import annotations

import statistics
import time
from collections import deque

import torch

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""What a training step is made of; their sum is the time spent training."""
_RECENT_STEPS = 50


class StepClock:
    """Gives the time between two marks to a phase. This one reads the host's clock, for CPUs.

    What lies between `pause` and the next mark (validation) belongs to no phase.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """Of each phase, up to the last `settle`."""
        self.recent_steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds of the last optimizer steps; the process's first, which also pays for memory and kernels,
        is left out.
        """
        self.last_pause = 0.0
        """Seconds of the last pause."""
        self._in_step = 0.0
        self._is_first_step = True
        self._is_paused = False
        self._last = 0.0

    def start(self) -> None:
        """Begin: what came before is not counted, and the running step began now."""
        self._is_paused = False
        self._in_step = 0.0
        self._last = time.perf_counter()

    def mark(self, phase: str, *, ends_step: bool = False) -> None:
        """What went on since the last mark was `phase`."""
        now = time.perf_counter()
        self._add(self._counted(phase), now - self._last, ends_step)
        self._last = now

    def pause(self) -> None:
        """What went on since the last mark was `other`; what comes next is not training."""
        self.mark("other")
        self._is_paused = True

    def settle(self) -> None:
        """Bring `seconds` and `recent_steps` up to the last mark. Waits for the device."""

    @property
    def is_settled(self) -> bool:
        """Whether `seconds` are those up to the last mark."""
        return True

    @property
    def total(self) -> float:
        """Seconds of training up to the last `settle`."""
        return sum(self.seconds.values())

    @property
    def usual_step(self) -> float | None:
        """Seconds of a step: the median of the recent ones."""
        return statistics.median(self.recent_steps) if self.recent_steps else None

    def _counted(self, phase: str) -> str | None:
        phase_or_pause = None if self._is_paused else phase
        self._is_paused = False
        return phase_or_pause

    def _add(self, phase: str | None, seconds: float, ends_step: bool) -> None:
        if phase is None:
            self.last_pause = seconds
            return
        self.seconds[phase] += seconds
        self._in_step += seconds
        if ends_step:
            if not self._is_first_step:
                self.recent_steps.append(self._in_step)
            self._is_first_step = False
            self._in_step = 0.0


class CudaStepClock(StepClock):
    """Marks are events on the GPU's stream, read when they are over: the time is that of the GPU.

    A phase that the host prepares in time costs nothing; `data` is what the GPU waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[tuple[str | None, bool, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._base: torch.cuda.Event | None = None

    def start(self) -> None:
        self.settle()
        super().start()
        self._base = self._record()

    def mark(self, phase: str, *, ends_step: bool = False) -> None:
        self._pending.append((self._counted(phase), ends_step, self._record()))
        if ends_step:
            self._read_finished()

    def settle(self) -> None:
        if self._pending:
            self._pending[-1][2].synchronize()
            self._read_finished()

    @property
    def is_settled(self) -> bool:
        return not self._pending

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_finished(self) -> None:
        """Read the events that are over, so that few wait for being read."""
        while self._pending and self._pending[0][2].query():
            phase, ends_step, event = self._pending.popleft()
            assert self._base is not None
            self._add(phase, self._base.elapsed_time(event) / 1e3, ends_step)
            self._spare.append(self._base)
            self._base = event


def step_clock(device: torch.device) -> StepClock:
    """The clock for what runs on `device`."""
    return CudaStepClock() if device.type == "cuda" else StepClock()
