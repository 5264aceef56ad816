"""Best-fit-decreasing packing: many rows to few packs of fixed capacity."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


def pack_best_fit(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Distribute items so that no pack exceeds `capacity`: the longest first, each where it leaves least
    room.

    Returns the numbers of the items in each pack. O(n log n) comparisons. Every length must be at most
    `capacity`.
    """
    numbered = sorted(
        ((length, number) for number, length in enumerate(lengths)), key=lambda item: (-item[0], item[1])
    )
    packs: list[list[int]] = []
    # (room left, number of the pack), ascending, full packs left out
    rooms: list[tuple[int, int]] = []
    for length, number in numbered:
        assert length <= capacity
        index = bisect_left(rooms, (length, -1))
        if index < len(rooms):
            room, pack = rooms.pop(index)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(number)
        if room > length:
            insort(rooms, (room - length, pack))
    return packs
