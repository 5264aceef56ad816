"""Time one layer of routed experts on a CPU, ours beside transformers', forward and backward.

    python scripts/benchmark_experts.py --plugins native,fp8 --rounds 20

Each round times every choice once, so that whatever else the machine does falls on all of them. A step is the
way of the rows: sort by expert, experts, weighted sum, and all gradients, with the copies of the weights that
a plugin keeps made anew, as after an optimizer step. The router's own product is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from afmoe.errors import ConfigError, ScriptParser, script_errors

if TYPE_CHECKING:
    from torch import Tensor

THEIRS = ("eager", "grouped_mm")
BASE = "native"


@dataclass(frozen=True)
class Timing:
    name: str
    milliseconds: list[float]

    @property
    def best(self) -> float:
        return min(self.milliseconds)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        first, _, third = statistics.quantiles(self.milliseconds, n=4)
        return first, third


def main() -> None:
    options = read_options()
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    steps = {f"transformers {name}": their_step(options, name) for name in THEIRS if options.transformers}
    steps |= {name: our_step(options, name) for name in options.plugins}
    timings = measure(steps, options.rounds, time.thread_time if options.cpu_time else time.perf_counter)
    if options.json:
        print(json.dumps({"options": vars(options), "timings": [asdict(timing) for timing in timings]}))
    else:
        print("\n".join(table(timings, options)))


def read_options() -> argparse.Namespace:
    parser = ScriptParser(
        description=(__doc__ or "").split("\n\n", 1)[0], epilog=(__doc__ or "").rpartition("\n\n")[2]
    )
    sizes = {
        "hidden-size": 256,
        "num-experts": 128,
        "top-k": 8,
        "intermediate-size": 128,
        "tokens": 2048,
        "threads": 2,
        "rounds": 12,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument(
        "--plugins",
        type=lambda text: text.split(","),
        default=["native", "bf16", "fp8", "mxfp8", "reference"],
        help="of the group moe/compute, separated by commas",
    )
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time on the core, not on the wall, for a busy machine; only with --threads 1",
    )
    parser.add_argument("--json", action="store_true", help="every single time, for programs")
    options = parser.parse_args()
    for name in sizes:
        value, least = getattr(options, name.replace("-", "_")), 2 if name == "rounds" else 1
        if value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    if options.cpu_time and options.threads != 1:
        raise ConfigError("--cpu-time sees one thread; add --threads 1")
    if options.top_k > options.num_experts:
        raise ConfigError(f"--top-k must not exceed --num-experts={options.num_experts}, got {options.top_k}")
    return options


@dataclass(frozen=True)
class Inputs:
    tokens_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor


def make_inputs(options: argparse.Namespace) -> Inputs:
    """Tokens, and experts that are unevenly popular, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(0)
    popularity_E = 0.3 * torch.randn(options.num_experts, generator=generator)
    logits_TE = torch.randn(options.tokens, options.num_experts, generator=generator) + popularity_E
    shape = (options.tokens, options.hidden_size)
    return Inputs(
        tokens_TD=torch.randn(shape, generator=generator).requires_grad_(),
        expert_ids_TK=logits_TE.topk(options.top_k, 1).indices,
        weights_TK=torch.rand(options.tokens, options.top_k, generator=generator).requires_grad_(),
        grad_TD=torch.randn(shape, generator=generator),
    )


def their_step(options: argparse.Namespace, implementation: str) -> Callable[[], None]:
    """One forward and backward of transformers' `AfmoeExperts` under that `experts_implementation`."""
    import torch
    from transformers.models.afmoe.configuration_afmoe import AfmoeConfig
    from transformers.models.afmoe.modeling_afmoe import AfmoeExperts

    config = AfmoeConfig(
        hidden_size=options.hidden_size,
        num_experts=options.num_experts,
        num_experts_per_tok=options.top_k,
        moe_intermediate_size=options.intermediate_size,
    )
    config._experts_implementation = implementation
    experts = AfmoeExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.06)
    inputs = make_inputs(options)

    def step() -> None:
        y_TD = experts(inputs.tokens_TD, inputs.expert_ids_TK, inputs.weights_TK)
        leaves = [inputs.tokens_TD, inputs.weights_TK, *experts.parameters()]
        torch.autograd.grad(y_TD, leaves, inputs.grad_TD)

    return step


def our_step(options: argparse.Namespace, name: str) -> Callable[[], None]:
    """One forward and backward of dispatcher `local` and the compute plugin `name`."""
    import torch

    from afmoe.hardware import detect_hardware
    from afmoe.moe.compute import ExpertShape, check_compute
    from afmoe.registry import build, configure, plugin_of

    config, hardware = configure("moe/compute", name), detect_hardware("cpu")
    shape = ExpertShape(
        num_experts=options.num_experts,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        activation="silu",
    )
    check_compute(plugin_of(config), config, hardware=hardware, shape=shape)
    compute = build(config, hardware=hardware, shape=shape)
    dispatcher = build(configure("moe/dispatch", "local"), num_experts=options.num_experts)
    wide = (options.num_experts, options.intermediate_size, options.hidden_size)
    gate_LFD, up_LFD = (0.06 * torch.randn(wide) for _ in range(2))
    weights = [gate_LFD, up_LFD, 0.06 * torch.randn(wide).transpose(1, 2).contiguous()]
    for weight in weights:
        weight.requires_grad_()
    inputs = make_inputs(options)

    def step() -> None:
        compute.on_weights_updated()
        dispatched = dispatcher.dispatch(
            inputs.tokens_TD, inputs.weights_TK, dispatcher.plan(inputs.expert_ids_TK, None)
        )
        rows_RD = compute(dispatched.rows_RD, dispatched.offsets_L, *weights)
        y_TD = dispatcher.combine(rows_RD, dispatched.state)
        torch.autograd.grad(y_TD, [inputs.tokens_TD, inputs.weights_TK, *weights], inputs.grad_TD)

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> list[Timing]:
    """The times of each step, one of each a round, after one untimed round."""
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            step()
            if number:
                milliseconds[name].append(1e3 * (clock() - start))
    return [Timing(name, values) for name, values in milliseconds.items()]


def table(timings: list[Timing], options: argparse.Namespace) -> list[str]:
    import torch

    base = next((timing for timing in timings if timing.name == BASE), timings[0])
    lines = [
        f"hidden {options.hidden_size}, {options.num_experts} experts of width {options.intermediate_size}, "
        f"top-{options.top_k}, {options.tokens} tokens, fp32, {options.threads} threads, "
        f"{options.rounds} rounds, {'cpu' if options.cpu_time else 'wall'} time, torch {torch.__version__}",
        "",
        f"| forward + backward | least ms | median ms | quartiles ms | times {base.name} (least, median) |",
        "|---|---:|---:|---:|---:|",
    ]
    for timing in timings:
        first, third = timing.quartiles
        lines.append(
            f"| {timing.name} | {timing.best:.1f} | {timing.median:.1f} | {first:.1f} - {third:.1f} | "
            f"{timing.best / base.best:.2f}, {timing.median / base.median:.2f} |"
        )
    return lines


if __name__ == "__main__":
    with script_errors():
        main()
