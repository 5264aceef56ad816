"""What a run needs before it is started: memory of a rank, bytes between ranks, and what to change.

Closed formulas over the config, without torch. docs/planning.md has them with their symbols; tests compare
them with the bytes of real tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.planning.memory import memory_parts
from afmoe.planning.parts import ALWAYS, Part, peak
from afmoe.planning.setup import Setup
from afmoe.planning.states import state_parts
from afmoe.planning.wire import Traffic, traffic

__all__ = ["Part", "Plan", "Setup", "Traffic", "least_bytes", "make_plan"]

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """One rank of one setup."""

    setup: Setup
    parts: list[Part]
    traffic: list[Traffic]

    @property
    def peak_bytes(self) -> int:
        """On the device."""
        return peak(self.parts)

    @property
    def host_bytes(self) -> int:
        """In the host's memory, of this rank."""
        return peak(self.parts, on_host=True)

    def fits(self, memory_gib: float) -> bool:
        return self.peak_bytes <= memory_gib * GIB


def least_bytes(setup: Setup) -> int:
    """Weights, gradients and optimizer states on the device: what no batch size makes smaller."""
    return sum(part.num_bytes for part in state_parts(setup) if part.when == ALWAYS and not part.on_host)


def make_plan(setup: Setup) -> Plan:
    return Plan(setup, memory_parts(setup), traffic(setup))
