"""How a run of several ranks ends: where they all know it at the same place, and one of them says why.

A rank that ends alone leaves the others in a collective that never comes: they see the connection closed, or
wait for their time limit. What can be agreed on is, and then only rank 0 speaks and carries the exit code.
"""

from __future__ import annotations

from typing import TypeVar

from afmoe.errors import MachineError, UserError
from afmoe.signals import Interrupted

Error = TypeVar("Error", bound=UserError)


class Diverged(UserError):
    """Too many optimizer steps in a row had a loss or gradient that is no finite number."""


class NotSaved(MachineError):
    """The disk refused a checkpoint. All that the ranks do together in a save was done."""


class EndedByAnother(SystemExit):
    """This rank ends with the run, and another one says why: nothing on this one's screen.

    Its code is 0 where all have `agreed`: Lightning's launcher kills every process as soon as one that it
    started ends with another, and rank 0 is not done yet.
    """

    def __init__(self, *, agreed: bool) -> None:
        super().__init__(0 if agreed else 1)
        self.agreed = agreed


def for_rank(error: Error, rank: int) -> Error | EndedByAnother:
    """What a rank raises where all end with the same error."""
    return error if rank == 0 else EndedByAnother(agreed=True)


def is_agreed(error: BaseException) -> bool:
    """Whether every rank ends with it at the same place, so that they can still talk to each other."""
    if isinstance(error, Interrupted | EndedByAnother):
        return error.agreed
    return isinstance(error, Diverged | NotSaved)


# gloo's words and NCCL's; torch's store has a class of its own
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "Broken pipe")


def is_peer_lost(error: BaseException) -> bool:
    """Whether another rank was gone when this one talked to it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistNetworkError" in names or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
    )
