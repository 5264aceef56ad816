"""What this machine has, and which choices of which group can run on it: a report to paste into a bug.

    python scripts/doctor.py
    python scripts/doctor.py --accelerator cpu --json

Nothing is trained, fetched or changed (kernels for this CPU are built if no run has yet), and the report
names no folder and no host.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from afmoe.errors import ScriptParser, UserError, script_errors

if TYPE_CHECKING:
    from afmoe.hardware import Hardware

PACKAGES = (
    "afmoe-recipe",
    "torch",
    "lightning",
    "transformers",
    "hydra-core",
    "omegaconf",
    "numpy",
    "safetensors",
    "tensorboard",
    "tokenizers",
    "torchmetrics",
    "datasets",
    "deepspeed",
    "triton",
    "flash-attn",
    "deep_gemm",
    "deep_ep",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM",
    "HYDRA_FULL_ERROR",
)
# a layer of Trinity Mini; what fails for these sizes fails for the machine
QUESTIONS: dict[str, dict[str, Any]] = {
    "attention": {"head_dim": 128, "dropout": 0.0, "is_training": True},
    "moe/compute": {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 1024, "activation": "silu"},
    "moe/dispatch": {"precision": "bf16-mixed"},
}


def main() -> None:
    options = read_options()
    # what plugins say when they are made belongs to a run
    logging.disable(logging.WARNING)
    report = make_report(options.accelerator)
    print(json.dumps(report, indent=2) if options.json else "\n".join(as_markdown(report)))


def read_options() -> argparse.Namespace:
    parser = ScriptParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="the device that choices are asked about; auto: a GPU where there is one",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser.parse_args()


def make_report(accelerator: str) -> dict[str, Any]:
    from afmoe.hardware import detect_hardware

    hardware = detect_hardware(accelerator)
    return {
        "versions": versions(),
        "machine": machine(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "device": asdict(hardware) | {"architecture": hardware.architecture},
        "plugins": plugins(hardware),
        "outside_plugins": outside_plugins(),
    }


def versions() -> dict[str, str | None]:
    """Of Python and of every package that matters here; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """System, processor, memory, threads, compiler and GPUs."""
    import torch

    from afmoe.hardware import detect_hardware

    cpu = detect_hardware("cpu")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu.name,
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(cpu.memory_gib, 1),
        "memory_available_gib": available_memory_gib(),
        "has_cxx_compiler": cpu.has_cxx_compiler,
        "has_c_compiler": cpu.has_c_compiler,
        "has_cpu_kernels": has_cpu_kernels(),
        "cuda": torch.version.cuda,
        "gpus": gpus(),
        "is_offline": os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"),
    }


def has_cpu_kernels() -> bool:
    from afmoe.errors import MachineError
    from afmoe.moe.cpu_kernels.library import load_library

    try:
        load_library()
    except MachineError:
        return False
    return True


def available_memory_gib() -> float | None:
    """Free memory and what the system would give back; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return round(int(sizes["MemAvailable"].split()[0]) / 2**20, 1) if "MemAvailable" in sizes else None


def gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]


def plugins(hardware: Hardware) -> dict[str, dict[str, dict[str, str | None]]]:
    """For each choice of each group: `runs` (what would run, where it says so) or `reason`."""
    from afmoe.plugins import PLUGINS, known_names

    return {
        group: {name: judge(group, name, hardware) for name in sorted(known_names(group))}
        for group in PLUGINS
    }


def outside_plugins() -> dict[str, str | None]:
    """What other packages add, by entry point: why it fails to import, or None."""
    found: dict[str, str | None] = {}
    for entry_point in importlib.metadata.entry_points(group="afmoe.plugins"):
        found[entry_point.name] = None
        try:
            entry_point.load()
        # any exception: the import runs another package's code
        except Exception as error:
            found[entry_point.name] = f"{type(error).__name__}: {error}"
    return found


def judge(group: str, name: str, hardware: Hardware) -> dict[str, str | None]:
    from afmoe import registry

    try:
        plugin: Any = registry.find(group, name)
        if group not in QUESTIONS:
            return {"runs": "yes"}
        config = registry.configure(group, name)
        questions = QUESTIONS[group]
        if group == "moe/compute":
            from afmoe.moe.compute import ExpertShape

            questions = {"shape": ExpertShape(**questions)}
        reason = plugin.why_not(config, hardware=hardware, **questions)
        if reason is None and group == "moe/compute":
            return {"runs": registry.build(config, hardware=hardware, **questions).description}
    # a package that is missing or broken, or an outside plugin's own check
    except (ImportError, OSError, UserError) as error:
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
    return {"runs": "yes"} if reason is None else {"reason": reason}


def as_markdown(report: dict[str, Any]) -> list[str]:
    found, machine, device = report["versions"], report["machine"], report["device"]
    absent = [package for package, version in found.items() if version is None]
    memory = f"{machine['memory_gib']} GiB"
    if machine["memory_available_gib"] is not None:
        memory += f", {machine['memory_available_gib']} available"
    settings = [f"{name}={value}" for name, value in report["environment"].items() if value is not None]
    facts = {
        "versions": ", ".join(f"{package} {version}" for package, version in found.items() if version),
        "not installed": ", ".join(absent) or "nothing",
        "system": machine["system"],
        "cpu": f"{machine['cpu']} ({machine['cpu_instructions']}), {machine['cores']} cores, "
        f"{machine['torch_threads']} torch threads",
        "memory": memory,
        "gpu": "; ".join(machine["gpus"]) or f"none (torch's CUDA: {machine['cuda'] or 'none'})",
        "C compiler": _c_compiler(machine),
        "C++ compiler": "yes" if machine["has_cxx_compiler"] else "no (the default path needs none)",
        "hub": "offline (HF_HUB_OFFLINE)" if machine["is_offline"] else "online, as far as settings say",
        "set": ", ".join(settings) or "nothing",
    }
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name} | {cell(text)} |" for name, text in facts.items()]
    lines += ["", f"Choices on {device['name'] or device['device_type']} ({device['architecture']}):", ""]
    lines += ["| choice | runs here |", "|---|---|"]
    for group, names in report["plugins"].items():
        for name, verdict in names.items():
            text = verdict.get("runs") or f"**no**: {verdict['reason']}"
            lines.append(f"| `{group}={name}` | {cell(text)} |")
    for name, failure in report["outside_plugins"].items():
        text = "imported" if failure is None else f"**fails to import**: {failure}"
        lines.append(f"| outside plugin `{name}` | {cell(text)} |")
    return lines


def cell(text: str) -> str:
    """One line, without the border of a table's cell."""
    return " ".join(text.replace("|", "/").split())


def _c_compiler(machine: dict[str, Any]) -> str:
    if machine["has_cpu_kernels"]:
        return "yes"
    found = (
        "yes, but what it builds cannot be kept or run; a run says why" if machine["has_c_compiler"] else "no"
    )
    return f"{found} (experts on a CPU are multiplied by torch)"


if __name__ == "__main__":
    with script_errors():
        main()
