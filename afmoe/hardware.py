"""What this machine has, as one record.

Plugins decide from the record, never from the machine, whether they can run: so the decision is made before a
model is built, and a test can ask it for hardware that is not there.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from afmoe.errors import ConfigError, MachineError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device and what plugins ask about it."""

    device_type: str
    """`cpu` or `cuda`."""
    name: str = ""
    """Product name, for people."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, (9, 0) for sm_90; None on a CPU."""
    num_devices: int = 1
    """Devices of this type in this machine; a CPU counts as one."""
    has_cxx_compiler: bool = False
    """Whether `torch.compile` can build CPU code: a C++ compiler and Python's headers."""
    has_c_compiler: bool = False
    """Whether this project's CPU kernels can be built: gcc, on Linux."""
    has_deep_gemm: bool = False
    """Whether DeepGEMM's Python package is installed."""
    has_deep_ep: bool = False
    """Whether DeepEP's Python package is installed."""
    has_triton: bool = False
    """Whether kernels in Triton can be compiled: the package is installed and the device is a CUDA GPU."""
    memory_gib: float = 0.0
    """Memory of one device."""

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    @property
    def architecture(self) -> str:
        """`sm_90` for capability (9, 0), the device type on anything but a CUDA GPU."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else self.device_type


def detect_hardware(accelerator: str = "auto") -> Hardware:
    """Describe the device that Lightning's `accelerator` stands for: `auto`, `cpu`, `gpu` or `cuda`.

    `auto` is CUDA where a GPU is seen, else the CPU. Raises `MachineError` where a GPU is asked for and none
    is seen.
    """
    import torch

    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise ConfigError(f"trainer.accelerator must be one of auto, cpu, gpu, cuda, got {accelerator}")
    has_gpu = accelerator != "cpu" and torch.cuda.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise MachineError(
            f"trainer.accelerator={accelerator}, but torch {torch.__version__} sees no CUDA GPU; "
            "use trainer.accelerator=cpu"
        )
    if not has_gpu:
        return Hardware(
            device_type="cpu",
            name=_cpu_name(),
            has_cxx_compiler=has_cxx_compiler(),
            has_c_compiler=c_compiler() is not None,
            memory_gib=_host_memory_gib(),
        )
    # the weakest device decides: what it cannot run, not every rank can
    index = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
    properties = torch.cuda.get_device_properties(index)
    return Hardware(
        device_type="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_devices=torch.cuda.device_count(),
        has_cxx_compiler=has_cxx_compiler(),
        has_deep_gemm=importlib.util.find_spec("deep_gemm") is not None,
        has_deep_ep=importlib.util.find_spec("deep_ep") is not None,
        has_triton=importlib.util.find_spec("triton") is not None,
        memory_gib=properties.total_memory / 2**30,
    )


def has_cxx_compiler() -> bool:
    """Whether `torch.compile` finds what it calls on a CPU: Python.h, and `CXX` or g++ (clang++ on macOS)."""
    default = "clang++" if platform.system() == "Darwin" else "g++"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return shutil.which(os.environ.get("CXX", default)) is not None and headers.is_file()


def c_compiler() -> list[str] | None:
    """Command of `CC` (a path, or a program with options), else of gcc or cc; None without, or no Linux."""
    # elsewhere torch brings another OpenMP than gcc's
    if platform.system() != "Linux":
        return None
    wanted = os.environ.get("CC", "").strip()
    for name, *options in [[wanted], wanted.split()] if wanted else [["gcc"], ["cc"]]:
        path = shutil.which(name)
        if path is not None:
            return [path, *options]
    return None


def c_compiler_remedy() -> str:
    """What to do where `c_compiler` finds none."""
    wanted = os.environ.get("CC", "").strip()
    if platform.system() == "Linux" and wanted:
        return f"CC={wanted} is no program here; correct it, or unset it where gcc is installed"
    return "install gcc, or set CC (Linux only)"


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bf16 (AVX512-BF16 or AMX), as far as Linux tells."""
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return False
    flags = re.search(r"^flags\s*: (.+)$", information.read_text(encoding="utf-8"), re.MULTILINE)
    return flags is not None and not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags[1].split())


def _cpu_name() -> str:
    """The processor's product name where the system tells it, else its architecture."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        found = re.search(r"^model name\s*: (.+)$", information.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _host_memory_gib() -> float:
    if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return 0.0
