"""What a run needs, before it is started: memory of a rank, bytes on the wire, and what to change.

    python scripts/plan.py model=trinity_mini trainer.devices=8 trainer/strategy=deepspeed ... --memory-gib 80

Takes the recipe's overrides and composes them with the recipe's code, so a plan is for exactly the command
that will run. Needs no GPU and makes no tensor. Planned are GPUs, except with trainer.accelerator=cpu.
Formulas and what they leave out: docs/planning.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from afmoe.compose import recipe
from afmoe.config import RunConfig
from afmoe.errors import ConfigError, ScriptParser, script_errors
from afmoe.planning import GIB, Plan, Setup, make_plan
from afmoe.planning.advice import Change, ranked_changes
from afmoe.planning.parameters import shapes
from afmoe.planning.parts import ALWAYS, total
from afmoe.planning.shape_of_run import planned_shape
from afmoe.planning.smallest import NUM_DEVICES, overrides_of, smallest

MODELS = ("trinity_nano", "trinity_mini", "trinity_large")
MEMORY_GIB = (80, 141)
TABLE_OVERRIDES = [
    "trainer.accelerator=gpu",
    "trainer.precision=bf16-true",
    "trainer/strategy=deepspeed",
    "moe/dispatch=all_to_all",
    "attention=flash",
    "model.vocab_size=200192",
    "data.sequence_length=4096",
    "data.batch_size=1",
]
"""What the table plans with, before the person's own overrides."""
MAX_CHANGES = 8


def main() -> None:
    options, overrides = read_options()
    if options.table:
        print("\n".join(table(overrides, options.imbalance)))
        return

    def plan(run: RunConfig) -> None:
        check_choices(run)
        setup = Setup.of(run, planned_shape(run), imbalance=options.imbalance)
        check_names(run, setup)
        result = make_plan(setup)
        check_split(run, result.setup)
        changes = ranked_changes(result.setup)
        if options.json:
            print(json.dumps(as_json(result, changes, options.memory_gib)))
        else:
            show(run.run_name, result, changes, options.memory_gib)

    call(plan, overrides)


def read_options() -> tuple[argparse.Namespace, list[str]]:
    parser = ScriptParser(
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog="Every other argument is an override of the recipe: `python recipes/sft.py --help`.",
    )
    parser.add_argument("--memory-gib", type=float, default=80.0, metavar="N", help="of one GPU, default 80")
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="N",
        help="rows of the busiest expert rank over the mean, default 1.0",
    )
    parser.add_argument("--json", action="store_true", help="every figure in bytes, for programs")
    parser.add_argument(
        "--table", action="store_true", help="Nano, Mini and Large on 1 to 128 GPUs: the least that fits"
    )
    options, overrides = parser.parse_known_args()
    unknown = [override for override in overrides if override.startswith("-")]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}; overrides of the recipe are written key=value")
    if options.imbalance < 1:
        raise ConfigError(
            f"--imbalance is the busiest rank over the mean, at least 1, got {options.imbalance}"
        )
    if not options.memory_gib > 0:
        raise ConfigError(f"--memory-gib must be positive, got {options.memory_gib}")
    return options, overrides


def call(function: Callable[[RunConfig], Any], overrides: Sequence[str]) -> None:
    """Hand `function` the config that the recipe would get with these overrides."""
    before = sys.argv
    with tempfile.TemporaryDirectory() as directory:
        # Hydra makes a run folder: not where the run's will be
        sys.argv = [before[0], *overrides, f"hydra.run.dir={directory}/plan"]
        try:
            recipe(config_name="sft")(function)()
        finally:
            sys.argv = before


def check_choices(run: RunConfig) -> None:
    """Let the plugins that the plan counts judge their options, as the recipe does."""
    from afmoe.registry import configure

    for group, section in (
        ("trainer/strategy", run.trainer.strategy),
        ("optim", run.optim),
        ("attention", run.attention),
        ("moe/compute", run.moe.compute),
        ("moe/dispatch", run.moe.dispatch),
        ("data", run.data),
    ):
        configure(group, section)


def check_names(run: RunConfig, setup: Setup) -> None:
    """Refuse patterns of parameters that do nothing, as the recipe does."""
    from afmoe.optim.groups import check_patterns
    from afmoe.registry import configure
    from callbacks.freeze_router import FreezeRouter

    names = (name for name, _ in shapes(setup.model))
    also_frozen = [FreezeRouter.frozen] if setup.freeze_router else []
    check_patterns(names, configure("optim", run.optim), also_frozen)


def check_split(run: RunConfig, setup: Setup) -> None:
    """Refuse what the strategy cannot share, as the recipe does before it builds anything."""
    if setup.strategy != "deepspeed":
        return
    from afmoe.hardware import Hardware
    from afmoe.parallel.deepspeed import check_strategy

    # a machine that lacks nothing: what the run's own can do is for the run to see
    present: dict[str, Any] = {
        field.name: True for field in dataclasses.fields(Hardware) if field.name.startswith("has_")
    }
    is_cuda = setup.device_type == "cuda"
    hardware = Hardware(
        device_type=setup.device_type, capability=(10, 0) if is_cuda else None, **present if is_cuda else {}
    )
    check_strategy(run, setup.model, world_size=setup.num_ranks, hardware=hardware)


def show(run_name: str, plan: Plan, changes: list[Change], memory_gib: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console, setup = Console(), plan.setup
    console.print(f"{run_name}: {describe(setup)}", highlight=False)

    def new_table(title: str, *columns: str) -> Table:
        result = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            result.add_column(column, justify="left" if number in (0, len(columns) - 1) else "right")
        return result

    memory = new_table("memory of a rank", "", "GiB", "of which")
    for section in dict.fromkeys(part.section for part in plan.parts):
        parts = [part for part in plan.parts if part.section == section and not part.on_host]
        if parts:
            inner = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in parts)
            memory.add_row(section, gib(total(parts)), inner)
    memory.add_row("peak", gib(plan.peak_bytes), verdict(plan, memory_gib))
    if plan.host_bytes:
        parts = [part for part in plan.parts if part.on_host]
        inner = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in parts)
        memory.add_row("host", gib(plan.host_bytes), f"for each rank of a node: {inner}")
    console.print(memory, highlight=False)
    if plan.traffic:
        wire = new_table("sent by a rank in one optimizer step", "", "GiB", "collectives", "")
        for kind in plan.traffic:
            wire.add_row(kind.name, gib(kind.num_bytes), f"{kind.num_collectives:,}", "")
        console.print(wire, highlight=False)
    if not plan.fits(memory_gib):
        advice = new_table("what to change, each alone", "", "saves GiB", "peak GiB", "")
        for change in changes[:MAX_CHANGES]:
            fits = "fits; " if change.peak_bytes <= memory_gib * GIB else ""
            advice.add_row(
                change.overrides, gib(change.saved_bytes), gib(change.peak_bytes), fits + change.note
            )
        console.print(advice, highlight=False)
        console.print(f"together: {together(setup, memory_gib)}", highlight=False)


def together(setup: Setup, memory_gib: float) -> str:
    """The least costly split of the same devices that fits, all else as planned."""
    (found,) = smallest(setup, setup.num_ranks, [memory_gib])
    if found is None:
        return f"no split of {setup.num_ranks} devices fits with everything else as it is"
    return f"{overrides_of(found.setup)}: {gib(found.peak_bytes)} GiB, fits"


def describe(setup: Setup) -> str:
    """The setup in one line."""
    devices = f"{setup.num_ranks} {'GPU' if setup.device_type == 'cuda' else 'CPU process'}"
    parts = [
        devices + ("" if setup.num_ranks == 1 else "es" if devices.endswith("ss") else "s"),
        setup.strategy + (f" ZeRO {setup.stage}" if setup.strategy == "deepspeed" else ""),
        f"ep_size {setup.ep_size}",
        setup.precision,
        f"attention {setup.attention}",
        f"experts {setup.compute}",
        f"checkpointing {setup.activation_checkpointing}",
        f"{setup.accumulate} x {setup.batch_size} x {setup.sequence_length} tokens a rank and step",
    ]
    if setup.imbalance > 1:
        parts.append(f"the busiest rank gets {setup.imbalance:g} x its share")
    return ", ".join(parts)


def verdict(plan: Plan, memory_gib: float) -> str:
    left = memory_gib * GIB - plan.peak_bytes
    if left >= 0:
        return f"fits: {gib(left)} of {memory_gib:g} are left"
    return f"does not fit: {gib(-left)} more than {memory_gib:g}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def as_json(plan: Plan, changes: list[Change], memory_gib: float) -> dict[str, Any]:
    setup = dataclasses.asdict(plan.setup)
    del setup["model"]
    return {
        "setup": setup,
        "memory_gib": memory_gib,
        "fits": plan.fits(memory_gib),
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "parts": [dataclasses.asdict(part) for part in plan.parts],
        "traffic": [dataclasses.asdict(kind) for kind in plan.traffic],
        "changes": [dataclasses.asdict(change) for change in changes],
    }


def table(overrides: Sequence[str], imbalance: float) -> list[str]:
    """Lines of a Markdown table: for each model and number of GPUs the least costly setup that fits."""
    columns = " | ".join(f"{memory} GiB" for memory in MEMORY_GIB)
    lines = [f"| model | GPUs | {columns} |", f"|---|---:|{'---|' * len(MEMORY_GIB)}"]

    def add(run: RunConfig) -> None:
        base = Setup.of(run, planned_shape(run), imbalance=imbalance)
        name = run.run_name.split("-")[1]
        for number in NUM_DEVICES:
            cells = map(cell, smallest(base, number, MEMORY_GIB))
            lines.append(f"| {name} | {number} | {' | '.join(cells)} |")

    for model in MODELS:
        call(add, [f"model={model}", *TABLE_OVERRIDES, *overrides])
    return lines


def cell(plan: Plan | None) -> str:
    if plan is None:
        return "-"
    setup = plan.setup
    parts = [f"EP {setup.ep_size}", f"ZeRO {setup.stage}"]
    if setup.activation_checkpointing != "none":
        parts.append(setup.activation_checkpointing)
    if setup.offload_optimizer:
        on_host = sum(part.num_bytes for part in plan.parts if part.on_host and part.when == ALWAYS)
        parts.append(f"offload ({on_host / GIB:.0f} on the host)")
    return f"{', '.join(parts)}: {plan.peak_bytes / GIB:.1f}"


if __name__ == "__main__":
    with script_errors():
        main()
