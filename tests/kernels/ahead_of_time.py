"""Compile the kernels that a gated MLP launches, for a GPU that is not there, and read the machine code.

A stand-in driver names the GPU, and every launch compiles instead: the real host code runs, so each kernel is
compiled for exactly the argument types, alignments and options that a launch would give it.

    python ahead_of_time.py FORMAT ARCHITECTURE SIZES...       prints a JSON list, one object per kernel
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_experts import KernelExperts
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from afmoe.moe.compute.kernels import fp8
from afmoe.moe.compute.kernels.bf16 import Bf16Products
from afmoe.moe.compute.kernels.fp8 import Fp8Products
from afmoe.moe.compute.kernels.mxfp8 import Mxfp8Products

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


def compile_launches(architecture: int, layer: Callable[[], None]) -> list[tuple[str, Any, float]]:
    """Run `layer`; return (label, compiled kernel, seconds) of each kernel that it launches."""
    driver.set_active(StandInDriver(architecture))
    compiled: dict[str, tuple[str, Any, float]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        seconds = time.perf_counter() - started
        values = dict(zip(self.arg_names, args, strict=False)) | options
        compiled.setdefault(kernel.hash, (_label(self.fn.__name__, values), kernel, seconds))
        return kernel

    JITFunction.run = compile_only
    try:
        layer()
    finally:
        JITFunction.run = run
    return list(compiled.values())


def _label(name: str, values: dict[str, Any]) -> str:
    words = [name.strip("_").removesuffix("_kernel")]
    if "NUM_PAIRS" in values:
        words.append(f"{values['NUM_PAIRS']} pairs")
    if "stride_wn" in values:
        words.append("w transposed" if values["stride_wn"] == 1 else "w")
    words += [key.removeprefix("WITH_").lower() for key in values if key.startswith("WITH_") and values[key]]
    return " ".join(words)


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
        "is_block_scaled": "block_scale" in kernel.asm["ptx"],
        "num_warps": kernel.metadata.num_warps,
        "num_stages": kernel.metadata.num_stages,
    }


def launch_layer(products: Any, hidden_size: int, intermediate_size: int, num_experts: int = 4) -> None:
    """One layer forward and backward in bf16, as on a GPU; what it computes is not looked at."""
    x_RD = torch.zeros(512, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    sizes = [(intermediate_size, hidden_size)] * 2 + [(hidden_size, intermediate_size)]
    weights = [torch.zeros(num_experts, *s, dtype=torch.bfloat16, requires_grad=True) for s in sizes]
    offsets_L = torch.zeros(num_experts, dtype=torch.int32)
    KernelExperts(products)(x_RD, offsets_L, *weights).sum().backward()


PRODUCTS = {
    "bf16": Bf16Products,
    "fp8": lambda: Fp8Products("fp32", "fp8"),
    "fp8-ue8m0": lambda: Fp8Products("ue8m0", "fp8"),
    "mxfp8": Mxfp8Products,
}


def compile_format(name: str, architecture: int, sizes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """One row per kernel of the format, over layers of the given sizes (hidden, intermediate)."""
    rows = []
    for hidden_size, intermediate_size in sizes:
        layer = partial(launch_layer, PRODUCTS[name](), hidden_size, intermediate_size)
        for label, kernel, seconds in compile_launches(architecture, layer):
            row = {"format": name, "architecture": architecture, "sizes": [hidden_size, intermediate_size]}
            rows.append(row | {"kernel": label, "seconds": round(seconds, 1)} | machine_code(kernel))
    return rows


def compile_spilling(architecture: int) -> list[dict[str, Any]]:
    """fp8's product with half of its warps: their registers cannot hold a 128 x 128 sum and its addend."""
    options = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}
    original, fp8.product_options = fp8.product_options, lambda bytes_per_stage: options
    try:
        rows = compile_format("fp8", architecture, ((256, 384),))
    finally:
        fp8.product_options = original
    return [row for row in rows if row["kernel"] == "multiply 1 pairs"][:1]


if __name__ == "__main__":
    chosen, architecture, *sizes = sys.argv[1:]
    if chosen == "spilling":
        print(json.dumps(compile_spilling(int(architecture))))
    else:
        pairs = tuple(tuple(map(int, size.split("x"))) for size in sizes)
        print(json.dumps(compile_format(chosen, int(architecture), pairs)))
