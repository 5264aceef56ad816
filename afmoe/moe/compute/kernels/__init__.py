"""Triton kernels of the expert compute, and why they may not run here.

Importing this package needs neither triton nor a GPU; its modules need triton. A layer is one autograd node
(`autograd`) over the grouped products of one format (`bf16`, `fp8`, `mxfp8`). Nothing waits for the GPU: the
tiles are laid out on the device (`layout`) and launches are sized by a bound.
"""

from __future__ import annotations

import importlib.util

from afmoe.hardware import Hardware

_PYPI = "install triton (torch's CUDA builds for Linux bring it)"


def why_no_kernels(choice: str, hardware: Hardware, capability: tuple[int, int], instead: str) -> str | None:
    """Why the kernels of `choice`, which need `capability`, cannot run on a GPU, and what would."""
    reasons = []
    if hardware.capability is None or hardware.capability < capability:
        architecture = f"sm_{capability[0]}{capability[1]}"
        reasons.append(f"needs a GPU of {architecture} or newer, this is {hardware.architecture}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("needs triton, which is not installed")
    return f"{choice} {' and '.join(reasons)}; {instead}" if reasons else None
