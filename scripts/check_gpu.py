"""Are the expert kernels right on this GPU, and how fast are they? Under 8 minutes, right or wrong first.

    python scripts/check_gpu.py                      # everything, about 6 minutes
    python scripts/check_gpu.py --quick              # right or wrong only, 2 to 3 minutes of compiling
    python scripts/check_gpu.py --json gpu.json

Exits with 1 when a figure is beyond its bound. Speed decides nothing: marks are printed as reached or missed.
On a CPU it checks the plugins' emulation, says what is left unchecked, and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_speed import SHAPES, compute_of, layer_operands, measure_everything
from torch import Tensor

from afmoe.checkpoint.atomic import write_text
from afmoe.errors import ScriptParser, script_errors
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.compute import ExpertShape
from afmoe.registry import configure, find

if TYPE_CHECKING:
    from afmoe.moe.compute.kernels.contract import ProjectionCase

# bf16 rounds a result by 1.7e-3, and so much is left to fp8 in fp32, because the tensor cores of sm_90 add
# its products with fewer than 32 bits. Operands that are not quantized would be within 4e-3 of exact, so
# quantized ones have to be beyond 1e-2
BF16_RESULT, FP32_RESULT = 4e-3, 1e-5
QUANTIZED = (1e-2, 5e-2)
LAYER = {"native": (0.0, 2.1e-2), "bf16": (0.0, 2.1e-2), "fp8": (1e-2, 2e-1), "mxfp8": (1e-2, 2e-1)}
COUNTS = (130, 0, 1, 200, 69, 128, 0, 513)
DEADLINE_SECONDS = 420


@dataclass
class Report:
    machine: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def check(self, name: str, value: float, lowest: float, highest: float) -> None:
        is_right = lowest <= value <= highest
        self.checks.append({"check": name, "value": value, "bounds": [lowest, highest], "right": is_right})
        word = "right" if is_right else "WRONG"
        print(f"{word}  {name:58s} {value:9.2e}  [{lowest:g}, {highest:g}]", flush=True)

    @contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """Checks that break are wrong, and the next ones are made."""
        try:
            yield
        # whatever it is (torch, triton's compiler, the driver): what the other formats would have shown is
        # worth more than an early end, because time on a GPU is short
        except Exception as error:
            traceback.print_exc()
            self.check(f"{name}, broken: {type(error).__name__}", float("nan"), 0, 0)

    def write(self, path: Path | None) -> None:
        if path is not None:
            write_text(path, json.dumps(asdict(self), indent=2) + "\n")


def main() -> None:
    options = read_options()
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    started = time.monotonic()
    hardware = detect_hardware("cpu" if options.cpu else "auto")
    report = Report(machine_of(hardware))
    print("  ".join(f"{key}={value}" for key, value in report.machine.items()), flush=True)
    device = torch.device(hardware.device_type)
    check_plugins(report, hardware, device)
    if hardware.has_triton:
        check_kernels(report, device, formats_for(hardware))
        check_no_waiting(report, hardware, device)
        # in case that the time ends before the measurements do
        report.write(options.json)
        if not options.quick:
            deadline = started + DEADLINE_SECONDS
            speed = measure_everything(device, hardware, choices_for(hardware), SHAPES, deadline)
            report.speed, report.marks = speed.rows, speed.marks
            report.left_out += speed.left_out
    else:
        report.left_out.append(
            "the Triton kernels' results, waiting and speed: "
            + ("triton is not installed" if hardware.is_cuda else "this is a CPU; see docs/gpu.md")
        )
    for line in report.left_out:
        print(f"not checked: {line}")
    report.write(options.json)
    num_wrong = sum(not check["right"] for check in report.checks)
    print(f"{len(report.checks)} checks, {num_wrong} wrong, {time.monotonic() - started:.0f} s")
    sys.exit(num_wrong > 0)


def read_options() -> argparse.Namespace:
    parser = ScriptParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="right or wrong only, no timing")
    parser.add_argument("--cpu", action="store_true", help="as on a machine without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    return parser.parse_args()


def machine_of(hardware: Hardware) -> dict[str, Any]:
    machine = {"device": hardware.name, "architecture": hardware.architecture, "torch": torch.__version__}
    if hardware.has_triton:
        import triton  # pyright: ignore[reportMissingImports]

        properties = torch.cuda.get_device_properties(0)
        machine |= {"triton": triton.__version__, "multiprocessors": properties.multi_processor_count}
    return machine


def formats_for(hardware: Hardware) -> list[str]:
    """The kernels' formats that this GPU can compile. mxfp8 on sm_90 is bf16 products: right, not fast."""
    assert hardware.capability is not None
    formats = {"bf16": (8, 0), "fp8": (8, 9), "fp8-ue8m0": (8, 9), "fp8-wgrad-bf16": (8, 9), "mxfp8": (9, 0)}
    return [name for name, capability in formats.items() if hardware.capability >= capability]


def choices_for(hardware: Hardware) -> dict[str, Any]:
    """Plugins that run here without being slower on purpose, by name."""
    choices: dict[str, Any] = {
        "native": "native",
        "bf16": {"name": "bf16", "kernels": "triton"} if hardware.has_triton else "bf16",
        "fp8": "fp8",
        "mxfp8": "mxfp8",
    }
    shape = ExpertShape(num_experts=8, hidden_size=256, intermediate_size=384, activation="silu")
    possible = {}
    for name, choice in choices.items():
        plugin: Any = find("moe/compute", name)
        config = configure("moe/compute", choice)
        if plugin.why_not(config, hardware=hardware, shape=shape) is None:
            possible[name] = choice
    return possible


def check_plugins(report: Report, hardware: Hardware, device: torch.device) -> None:
    """Whole layers, as a model calls them, against `reference` in fp64."""
    dtype = torch.bfloat16 if hardware.is_cuda else torch.float32
    sizes = (len(COUNTS), 256, 384)
    operands, offsets_L, grad_RD = layer_operands(*sizes, torch.tensor(COUNTS), dtype, device, num_padding=5)
    reference = compute_of("reference", *sizes, hardware)
    expected = run_layer(reference, [t.double() for t in operands], offsets_L, grad_RD)
    for name, choice in choices_for(hardware).items():
        with report.going_on(f"plugin {name}"):
            actual = run_layer(compute_of(choice, *sizes, hardware), operands, offsets_L, grad_RD)
            for what, value in actual.items():
                report.check(f"plugin {name}, {what}", deviation(value, expected[what]), *LAYER[name])
            padding = sum(int((actual[what][sum(COUNTS) :] != 0).sum()) for what in ("y", "gradient of x"))
            experts = [e for e, count in enumerate(COUNTS) if count == 0]
            empty = int((actual["gradient of up"][experts] != 0).sum())
            report.check(f"plugin {name}, values of padding and empty experts", padding + empty, 0, 0)


def check_kernels(report: Report, device: torch.device, formats: list[str]) -> None:
    """Each format's quantizers bit for bit, its products against the written contract and against fp64."""
    from afmoe.moe.compute.kernels import contract

    for size_k, size_n in ((256, 384), (200, 136)):
        projection = projection_case(size_k, size_n, device)
        exact = contract.products_as_written(contract.Exact(), projection)
        for name in formats:
            with report.going_on(f"{name} {size_k}x{size_n}"):
                check_format(report, name, projection, exact, f"{name} {size_k}x{size_n}")


def check_format(
    report: Report, name: str, projection: ProjectionCase, exact: dict[str, Tensor], where: str
) -> None:
    from afmoe.moe.compute.kernels import contract

    make_products, written = contract.FORMATS[name]
    if name in ("fp8", "fp8-ue8m0", "mxfp8"):
        for what, (stored, wanted) in contract.stored_copies(name, projection).items():
            report.check(f"{where}, {what}, different", contract.num_different(stored, wanted), 0, 0)
    as_written = contract.products_as_written(written, projection)
    for dtype in (torch.float32, torch.bfloat16):
        values = contract.products_of_kernels(make_products(), projection, dtype)
        highest = FP32_RESULT if (name, dtype) == ("bf16", torch.float32) else BF16_RESULT
        for what, wanted in as_written.items():
            value = values[what][: len(wanted)]
            report.check(f"{where}, {what} in {dtype}", deviation(value, wanted), 0, highest)
            if name != "bf16" and (name, what) != ("fp8-wgrad-bf16", "weight gradient"):
                report.check(f"{where}, {what} against fp64", deviation(value, exact[what]), *QUANTIZED)


def check_no_waiting(report: Report, hardware: Hardware, device: torch.device) -> None:
    """Forward and backward on kernels, with torch told to raise where the host would wait for the GPU."""
    sizes = (len(COUNTS), 256, 384)
    case = layer_operands(*sizes, torch.tensor(COUNTS), torch.bfloat16, device)
    for name, choice in choices_for(hardware).items():
        with report.going_on(f"plugin {name}, waiting"):
            compute = compute_of(choice, *sizes, hardware)
            run_layer(compute, *case)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run_layer(compute, *case)
                waits = 0
            except RuntimeError as error:
                waits = 1
                print(f"       {name}: {str(error).splitlines()[0]}")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            # torch's own grouped products may wait (see moe/compute=native)
            report.check(f"plugin {name}, times that the host waits for the GPU", waits, 0, name == "native")


def projection_case(size_k: int, size_n: int, device: torch.device) -> ProjectionCase:
    from afmoe.moe.compute.kernels.contract import ProjectionCase

    num_rows = sum(COUNTS) + 130

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    # rows of very different size
    x_RK = random(num_rows, size_k) * torch.exp2(torch.randint(-6, 6, (num_rows, 1), device=device))
    return ProjectionCase(
        x_RK=x_RK.bfloat16(),
        grad_RN=random(num_rows, size_n).bfloat16(),
        w_LNK=(random(len(COUNTS), size_n, size_k) / size_k**0.5).bfloat16(),
        second_w_LNK=(random(len(COUNTS), size_n, size_k) / size_k**0.5).bfloat16(),
        offsets_L=torch.tensor(COUNTS).cumsum(0).to(device, torch.int32),
    )


def run_layer(compute: Any, operands: list[Tensor], offsets_L: Tensor, grad_RD: Tensor) -> dict[str, Tensor]:
    leaves = [operand.detach().requires_grad_() for operand in operands]
    y_RD = compute(leaves[0], offsets_L, *leaves[1:])
    grads = torch.autograd.grad(y_RD, leaves, grad_RD.to(y_RD.dtype))
    names = ("gradient of x", "gradient of gate", "gradient of up", "gradient of down")
    return {"y": y_RD.detach()} | dict(zip(names, grads, strict=True))


def deviation(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


if __name__ == "__main__":
    with script_errors():
        main()
