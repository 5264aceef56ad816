"""The least costly way in which a model fits: for a number of devices and their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from afmoe.planning import GIB, Plan, make_plan
from afmoe.planning.advice import several_ranks_dispatch
from afmoe.planning.memory import memory_parts
from afmoe.planning.parts import peak
from afmoe.planning.setup import Setup

NUM_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128)
_LEVELS = ("none", "selective", "full")
_NODE = 8


def smallest(base: Setup, num_devices: int, memories_gib: Sequence[float]) -> list[Plan | None]:
    """For each memory the first setup that fits; None: none does.

    In the order of what it costs: states on the host last, before that experts beyond a node of 8, before
    that recomputation, before that a larger `ep_size`, before that ZeRO 2 (a reduction each micro-batch).
    """
    found: dict[float, Plan | None] = dict.fromkeys(memories_gib)
    for setup in sorted(_setups(base, num_devices), key=_cost):
        needed_gib = peak(memory_parts(setup)) / GIB
        for memory_gib in memories_gib:
            if found[memory_gib] is None and needed_gib <= memory_gib:
                found[memory_gib] = make_plan(setup)
        if all(found.values()):
            break
    return [found[memory_gib] for memory_gib in memories_gib]


def _setups(base: Setup, num_devices: int) -> Iterator[Setup]:
    sizes = [size for size in NUM_DEVICES if num_devices % size == 0 and base.model.num_experts % size == 0]
    places = (False, True) if base.optimizer == "adamw" and base.device_type == "cuda" else (False,)
    for ep_size, stage, level, offload in itertools.product(sizes, (1, 2), _LEVELS, places):
        yield base.but(
            num_ranks=num_devices,
            strategy="deepspeed",
            stage=stage,
            ep_size=ep_size,
            offload_optimizer=offload,
            activation_checkpointing=level,
            dispatch=several_ranks_dispatch(base) if ep_size > 1 else "local",
        )


def _cost(setup: Setup) -> tuple[int, ...]:
    level = _LEVELS.index(setup.activation_checkpointing)
    return setup.offload_optimizer, setup.ep_size > _NODE, level, setup.ep_size, setup.stage


def overrides_of(setup: Setup) -> str:
    """What chooses the split of `setup`, as typed on the recipe's command line."""
    parts = ["trainer/strategy=deepspeed", f"trainer.strategy.stage={setup.stage}"]
    if setup.ep_size > 1:
        parts += [f"trainer.strategy.ep_size={setup.ep_size}", f"moe/dispatch={setup.dispatch}"]
    if setup.offload_optimizer:
        parts.append("trainer.strategy.offload_optimizer=true")
    return " ".join([*parts, f"memory.activation_checkpointing={setup.activation_checkpointing}"])
