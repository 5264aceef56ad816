"""Mistakes that a person can mend, and how they are shown: one line, exit code 1, no trace.

Everything here imports hydra and omegaconf only, so that a misspelt option is answered before torch is loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the person at the keyboard can mend. The message says what, the value, the bound, the remedy."""


class ConfigError(UserError, ValueError):
    """A wrong choice, field or value in the configuration, in a checkpoint's config or in the data."""


class MachineError(UserError, RuntimeError):
    """This machine cannot do what was asked: hardware, library, disk, or another process in the way."""


def closest(name: str, valid: Iterable[str], limit: int = 10) -> str:
    """The valid names, those most like `name` first, at most `limit` of them, as one comma-separated text."""
    names = sorted(valid)
    # cutoff 0 ranks all of them: a name that resembles nothing still gets a list to choose from
    ranked = difflib.get_close_matches(name, names, n=limit, cutoff=0.0)
    text = ", ".join(ranked)
    return text if len(names) <= limit else f"{text}, ... ({len(names)} in all)"
