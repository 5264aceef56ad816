"""Whether a plugin runs on kernels that are compiled on this machine: its option `compiled`."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from afmoe.console import ONCE_A_MACHINE
from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware, c_compiler_remedy

if TYPE_CHECKING:
    from afmoe.moe.cpu_kernels.kernels import CpuKernels

log = logging.getLogger(__name__)

TRISTATE = ("auto", "true", "false")


def check_options(config: Any, **valid: tuple[str, ...]) -> None:
    """Refuse a value that is none of its option's; `true` on the command line, a bool, becomes text."""
    for key, values in valid.items():
        value = getattr(config, key)
        if isinstance(value, bool):
            value = str(value).lower()
            setattr(config, key, value)
        if value not in values:
            raise ConfigError(f"moe.compute.{key} must be one of {', '.join(values)}, got {value}")


def why_not_compiled(choice: str, compiled: str | bool, hardware: Hardware) -> str | None:
    """The reason against `compiled=true`."""
    if compiled != "true" or hardware.has_c_compiler:
        return None
    if hardware.is_cuda:
        return f"{choice} with moe.compute.compiled=true is for a CPU; use moe.compute.compiled=auto"
    return (
        f"{choice} with moe.compute.compiled=true needs a C compiler: {c_compiler_remedy()}; "
        "or use moe.compute.compiled=auto"
    )


def cpu_kernels_for(choice: str, compiled: str | bool, hardware: Hardware) -> CpuKernels | None:
    """The kernels, built if this machine has not yet; None where torch multiplies.

    Raises `MachineError` with `compiled=true` where they cannot be built.
    """
    if hardware.is_cuda or compiled == "false":
        return None
    from afmoe.moe.cpu_kernels.kernels import cpu_kernels

    try:
        if not hardware.has_c_compiler:
            raise MachineError(f"no C compiler was found: {c_compiler_remedy()}")
        return cpu_kernels()
    except MachineError as reason:
        if compiled == "true":
            raise
        say_once(
            f"{choice} multiplies by torch, one expert after the other, which takes up to twice the time of "
            f"compiled kernels ({reason}); moe.compute.compiled=false asks for this"
        )
        return None


@cache
def say_once(message: str) -> None:
    log.warning(message, extra={ONCE_A_MACHINE: True})
