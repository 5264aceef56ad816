"""Triton kernels of the expert compute, and why they may not run on a machine.

Importing this package needs neither triton nor a GPU; its modules need triton. A layer is one `mlp` over the
grouped products of one format (`bf16`, `fp8`, `mxfp8`), which share what a program works on (`tiles`) and how
it is launched (`launch`). Nothing waits for the GPU: the tiles are laid out on the device (`layout`) and
launches are sized by a bound.
"""

from __future__ import annotations

from afmoe.hardware import Hardware


def why_no_kernels(choice: str, hardware: Hardware, capability: tuple[int, int], instead: str) -> str | None:
    """Why the kernels of `choice`, written for GPUs from `capability` on, cannot run there; None: they can.

    All reasons at once. `instead`: what would work.
    """
    if not hardware.is_cuda:
        return f"{choice} needs a GPU, this is a CPU; {instead}"
    reasons = []
    if hardware.capability is not None and hardware.capability < capability:
        architecture = f"sm_{capability[0]}{capability[1]}"
        reasons.append(f"a GPU of {architecture} or newer, this one is {hardware.architecture}")
    if not hardware.has_triton:
        reasons.append("the package triton, which is not installed")
    return f"{choice} needs {', and '.join(reasons)}; {instead}" if reasons else None
