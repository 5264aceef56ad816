"""Steps that must not count: their detection, without waiting for the device.

A loss or gradient that is no finite number would poison every weight and every average of the optimizer. The
flag of such a step is a tensor on the device, handed to the optimizer as `found_inf`, which then leaves
parameters and state as they are, and is read by the host later.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


def non_finite(*figures: Tensor | None) -> Tensor:
    """fp32 scalar, 1 where one of the scalars is NaN or infinite, else 0; stays on the device."""
    known = [figure.detach().float().reshape(()) for figure in figures if figure is not None]
    return (~torch.isfinite(torch.stack(known)).all()).float()


class LaggedFlag:
    """Numbers of one step each, read from the device a step after they were made.

    The copy to the host is queued behind the step's own work, so that waiting for the copy of the step
    before leaves the device busy with the running one. On a CPU nothing lags.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def push(self, flag: Tensor) -> None:
        """Take the scalar of the step that was queued last."""
        if not flag.is_cuda:
            self._waiting.append((flag, None))
            return
        host = torch.empty((), dtype=flag.dtype, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((host, event))

    def read(self, *, wait: bool = False) -> list[float]:
        """The numbers that have not been read, oldest first; the newest only with `wait` or from a CPU."""
        values: list[float] = []
        while self._waiting and (wait or len(self._waiting) > 1 or self._waiting[0][1] is None):
            host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            values.append(float(host))
        return values
