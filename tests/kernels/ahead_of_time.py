"""Compile the kernels that a gated MLP launches, for a GPU that is not there, and read the machine code.

A stand-in driver names the GPU, and every launch compiles instead: the real host code runs, so each kernel is
compiled for exactly the argument types, alignments and options that a launch would give it.

    python ahead_of_time.py ARCHITECTURE...       prints one JSON object per kernel
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# it changes its default in triton 3.10, and both would warn
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"\b(HGMMA|QGMMA|HMMA|QMMA|UTCHMMA|UTCQMMA|LDL|STL|UTMALDG|LDGSTS)\b")


class StandInDriver:
    """A driver that knows which GPU to compile for and nothing else."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        # compiled kernels are kept per device
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_launches(architecture: int, launch: Any) -> dict[str, tuple[Any, float]]:
    """Run `launch`; return what each of its kernels was compiled to, and in how many seconds."""
    driver.set_active(StandInDriver(architecture))
    compiled: dict[str, tuple[Any, float]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__.strip("_").removesuffix("_kernel")
        constants = {key: value for key, value in options.items() if key not in ("num_warps", "num_stages")}
        label = name + "".join(
            f" {key}={value}" for key, value in constants.items() if key.startswith(("NUM_", "WITH_"))
        )
        strides = f" strides={args[14]}" if name == "multiply" else ""
        compiled.setdefault(label + strides, (kernel, time.perf_counter() - started))
        return kernel

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return compiled


def machine_code(kernel: Any) -> dict[str, Any]:
    """Instructions that matter, registers, stack and shared memory of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass, usage = (
            subprocess.run(
                [TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    return {
        "instructions": Counter(match.group(1) for match in INSTRUCTION.finditer(sass)),
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "shared_memory_kib": kernel.metadata.shared / 1024,
        "num_warps": kernel.metadata.num_warps,
        "num_stages": kernel.metadata.num_stages,
    }
