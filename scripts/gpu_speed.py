"""The part of `check_gpu.py` that measures: products, quantizers, expert layers and whole MoE blocks.

Random values, because zeros run faster (less power). Random, moderately skewed counts, the same for
everything that is compared. A figure is the median of about 100 ms of repetitions, each on a cold L2 cache.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.config import AfmoeConfig
from afmoe.hardware import Hardware
from afmoe.moe.block import MoeBlock
from afmoe.moe.compute import ExpertShape
from afmoe.registry import build, configure

NUM_TOKENS = 8192
MARK_BF16_TFLOPS = 400.0


@dataclass(frozen=True)
class Shape:
    """One rank's expert layer of a model, with its experts shared by `expert_ranks` ranks.

    A rank sends `NUM_TOKENS` times top-k copies and receives as many.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    num_experts_per_tok: int
    expert_ranks: int = 1

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.expert_ranks

    @property
    def num_rows(self) -> int:
        return NUM_TOKENS * self.num_experts_per_tok

    @property
    def layer_flops(self) -> float:
        """Three products, each forward and twice backward."""
        return 18.0 * self.num_rows * self.hidden_size * self.intermediate_size

    def counts(self) -> Tensor:
        shares = torch.softmax(0.3 * torch.randn(self.num_local_experts), 0)
        copies = torch.multinomial(shares, self.num_rows, replacement=True)
        return torch.bincount(copies, minlength=self.num_local_experts)


SHAPES = [
    Shape(f"{name} EP{ranks}", *sizes, ranks)
    for name, sizes in (
        ("Mini", (128, 2048, 1024, 8)),
        ("Nano", (128, 1024, 256, 8)),
        ("Large", (256, 3072, 3072, 4)),
    )
    for ranks in (1, 8)
]


@dataclass(frozen=True)
class Timing:
    median_ms: float
    spread: float
    """(90th percentile - 10th) / median."""


@dataclass
class Speed:
    rows: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def time(
        self, shape: str, what: str, run: Callable[[], Any], *, flops: float = 0.0, size: float = 0.0
    ) -> None:
        """Measure `run`, which takes `flops` operations or moves `size` bytes."""
        timing = measure(run)
        rates = {"TFLOP/s": flops / timing.median_ms / 1e9} if flops else {}
        rates |= {"GB/s": size / timing.median_ms / 1e6} if size else {}
        self.rows.append({"shape": shape, "what": what} | asdict(timing) | rates)
        text = "  ".join(f"{rate:8.1f} {unit}" for unit, rate in rates.items())
        print(f"{shape:10s} {what:36s} {timing.median_ms:9.3f} ms +-{timing.spread:4.0%}  {text}", flush=True)

    def rate(self, shape: str, what: str) -> float | None:
        """TFLOP/s of one row; None where it was not measured."""
        found = [row["TFLOP/s"] for row in self.rows if (row["shape"], row["what"]) == (shape, what)]
        return found[0] if found else None

    def mark(self, name: str, value: float | None, wanted: float | None) -> None:
        if value is None or wanted is None:
            return
        self.marks.append({"mark": name, "value": value, "wanted": wanted, "reached": value >= wanted})
        reached = "reached" if value >= wanted else "MISSED"
        print(f"{reached}: {name}: {value:.0f} TFLOP/s, wanted {wanted:.0f}", flush=True)


def measure(run: Callable[[], Any]) -> Timing:
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    quantiles: Any = do_bench(run, warmup=25, rep=100, quantiles=[0.5, 0.1, 0.9])
    median, low, high = quantiles
    return Timing(median, (high - low) / median)


def measure_everything(
    device: torch.device,
    hardware: Hardware,
    choices: dict[str, Any],
    shapes: list[Shape],
    deadline: float,
) -> Speed:
    """`choices`: plugins by name; `deadline`: `time.monotonic()` after which no further shape is begun."""
    speed = Speed()
    a, b = (torch.randn(NUM_TOKENS, NUM_TOKENS, dtype=torch.bfloat16, device=device) for _ in range(2))
    speed.time(
        "dense", f"torch bf16 {NUM_TOKENS} x {NUM_TOKENS}", lambda: a @ b.t(), flops=2.0 * NUM_TOKENS**3
    )
    for shape in shapes:
        if time.monotonic() > deadline:
            speed.left_out.append(f"the speed of {shape.name}: no time left")
            continue
        try:
            counts = shape.counts()
            measure_layers(speed, shape, counts, device, hardware, choices)
            measure_products(speed, shape, counts, device, [name for name in choices if name != "native"])
            if shape.expert_ranks == 1:
                measure_blocks(speed, shape, device, hardware, choices)
        # whatever it is, out of memory above all: the other shapes are worth the time that is left
        except Exception as error:
            traceback.print_exc()
            speed.left_out.append(f"the rest of the speed of {shape.name}: {type(error).__name__}")
        torch.cuda.empty_cache()
    set_marks(speed, shapes)
    return speed


def set_marks(speed: Speed, shapes: list[Shape]) -> None:
    for shape in shapes:
        own = speed.rate(shape.name, "layer bf16")
        if shape.name == "Mini EP1":
            speed.mark("Mini, bf16 layer against torch", own, speed.rate(shape.name, "layer native"))
            speed.mark("Mini, bf16 layer", own, MARK_BF16_TFLOPS)
        if shape.expert_ranks > 1:
            quantized = speed.rate(shape.name, "layer fp8, weights quantized too")
            speed.mark(f"{shape.name}, fp8 layer with all quantization against bf16", quantized, own)


def measure_layers(
    speed: Speed,
    shape: Shape,
    counts: Tensor,
    device: torch.device,
    hardware: Hardware,
    choices: dict[str, Any],
) -> None:
    """The experts of one layer, forward and backward, as a model calls them."""
    sizes = (shape.hidden_size, shape.intermediate_size)
    operands, offsets_L, grad_RD = layer_operands(
        shape.num_local_experts, *sizes, counts, torch.bfloat16, device
    )
    leaves = [operand.requires_grad_() for operand in operands]
    for name, choice in choices.items():
        compute = compute_of(choice, shape.num_local_experts, *sizes, hardware)

        def step(compute: Any = compute) -> None:
            torch.autograd.grad(compute(leaves[0], offsets_L, *leaves[1:]), leaves, grad_RD)

        def first_step(compute: Any = compute) -> None:
            compute.on_weights_updated()
            step(compute)

        speed.time(shape.name, f"layer {name}", step, flops=shape.layer_flops)
        if "fp8" in name:
            speed.time(
                shape.name, f"layer {name}, weights quantized too", first_step, flops=shape.layer_flops
            )


def measure_products(
    speed: Speed, shape: Shape, counts: Tensor, device: torch.device, formats: list[str]
) -> None:
    """Each product of the up projection, of torch and of each format, and what storing its operands takes."""
    from afmoe.moe.compute.kernels.bf16 import Bf16Products
    from afmoe.moe.compute.kernels.contract import FORMATS
    from afmoe.moe.compute.kernels.layout import TileLayout

    size_n, size_k = shape.intermediate_size, shape.hidden_size
    (x_RK, w_LNK, *_), offsets_L, _ = layer_operands(
        shape.num_local_experts, size_k, size_n, counts, torch.bfloat16, device
    )
    grad_RN = torch.randn(shape.num_rows, size_n, dtype=torch.bfloat16, device=device)
    flops = 2.0 * shape.num_rows * size_n * size_k
    torch_products = {
        "forward": lambda: F.grouped_mm(x_RK, w_LNK.transpose(1, 2), offs=offsets_L),
        "input gradient": lambda: F.grouped_mm(grad_RN, w_LNK, offs=offsets_L),
        "weight gradient": lambda: F.grouped_mm(grad_RN.t(), x_RK, offs=offsets_L),
    }
    for what, run in torch_products.items():
        speed.time(shape.name, f"torch grouped_mm, {what}", run, flops=flops)
    speed.time(shape.name, "tile layout", lambda: TileLayout.of(offsets_L, shape.num_rows))
    layout = TileLayout.of(offsets_L, shape.num_rows)
    makers = {name: FORMATS[name][0] for name in formats}
    if "bf16" in makers:
        # with one program a multiprocessor and a stage of copies more
        makers["bf16 alone"] = lambda: Bf16Products(fits_twice=False)
    for name, make_products in makers.items():
        products = make_products()
        weight = products.store_weight(w_LNK, transposed=True)
        x_rows, x_columns = products.store(x_RK, layout, rows=True, columns=True)
        grad_rows, grad_columns = products.store(grad_RN, layout, rows=True, columns=True)
        own_products = {
            "forward": lambda p=products, a=x_rows, w=weight.forward: p.multiply(
                [(a, w)], layout, torch.empty_like(grad_RN)
            ),
            "input gradient": lambda p=products, a=grad_rows, w=weight.transposed: p.multiply(
                [(a, w)], layout, torch.empty_like(x_RK)
            ),
            "weight gradient": lambda p=products, a=grad_columns, b=x_columns: p.weight_gradient(
                a, b, layout, torch.empty_like(w_LNK)
            ),
        }
        for what, run in own_products.items():
            speed.time(shape.name, f"{name}, {what}", run, flops=flops)
        if name in ("fp8", "mxfp8"):
            # two bytes read and two codes written a value
            speed.time(
                shape.name,
                f"{name}, quantize activations",
                lambda p=products: p.store(x_RK, layout, rows=True, columns=True),
                size=4.0 * x_RK.numel(),
            )
            speed.time(
                shape.name,
                f"{name}, quantize weights",
                lambda p=products: p.store_weight(w_LNK, transposed=True),
                size=4.0 * w_LNK.numel(),
            )


def measure_blocks(
    speed: Speed, shape: Shape, device: torch.device, hardware: Hardware, choices: dict[str, Any]
) -> None:
    """Whole MoE blocks, forward and backward: router, sort, experts, combine; rates count the experts."""
    config = AfmoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
    )
    hidden_BSD = torch.randn(1, NUM_TOKENS, shape.hidden_size, dtype=torch.bfloat16, device=device)
    grad_BSD = torch.randn_like(hidden_BSD)
    sizes = (shape.hidden_size, shape.intermediate_size)
    for name, choice in choices.items():
        compute = compute_of(choice, shape.num_experts, *sizes, hardware)
        dispatcher = build(configure("moe/dispatch", "local"), num_experts=shape.num_experts)
        with device:
            block = MoeBlock(config, 0, compute=compute, dispatcher=dispatcher, shared_expert=None).bfloat16()
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        leaves = [hidden_BSD.requires_grad_(), *block.parameters()]

        def step(block: MoeBlock = block, leaves: list[Tensor] = leaves) -> None:
            torch.autograd.grad(block(hidden_BSD)[0], leaves, grad_BSD)

        speed.time(shape.name, f"block {name}", step, flops=shape.layer_flops)


def compute_of(
    choice: Any, num_experts: int, hidden_size: int, intermediate_size: int, hardware: Hardware
) -> Any:
    shape = ExpertShape(
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation="silu",
    )
    return build(configure("moe/compute", choice), shape=shape, hardware=hardware)


def layer_operands(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    counts: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    num_padding: int = 0,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """x and the weights of gate, up and down; offsets; the gradient of y."""
    num_rows = int(counts.sum()) + num_padding
    into, back = (num_experts, intermediate_size, hidden_size), (num_experts, hidden_size, intermediate_size)
    x_RD, grad_RD = (torch.randn(num_rows, hidden_size, dtype=dtype, device=device) for _ in range(2))
    weights = [
        torch.randn(shape, dtype=dtype, device=device).div_(shape[2] ** 0.5) for shape in (into, into, back)
    ]
    return [x_RD, *weights], counts.cumsum(0).to(device, torch.int32), grad_RD
