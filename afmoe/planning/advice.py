"""Which setting to change when a run does not fit: every one that can be changed, planned again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from afmoe.planning.kept import materialises_scores
from afmoe.planning.memory import memory_parts
from afmoe.planning.parts import peak
from afmoe.planning.setup import Setup

_SMALL_BUCKET = 50_000_000


@dataclass(frozen=True)
class Change:
    """One change alone, everything else as planned."""

    overrides: str
    """As typed on the recipe's command line."""
    saved_bytes: int
    peak_bytes: int
    note: str = ""


def ranked_changes(setup: Setup) -> list[Change]:
    """Those that save memory on the device, the one that saves most first."""
    before = peak(memory_parts(setup))
    changes = []
    for overrides, values, note in _candidates(setup):
        after = peak(memory_parts(setup.but(**values)))
        changes.append(Change(overrides, before - after, after, note))
    return sorted(
        (change for change in changes if change.saved_bytes > 0), key=lambda change: -change.saved_bytes
    )


Candidate = tuple[str, dict[str, Any], str]


def _candidates(setup: Setup) -> Iterator[Candidate]:
    yield from _of_activations(setup)
    yield from _of_states(setup)
    yield from _of_ranks(setup)


def _of_activations(setup: Setup) -> Iterator[Candidate]:
    levels = ("none", "selective", "full")
    for level in levels[levels.index(setup.activation_checkpointing) + 1 :]:
        yield (
            f"memory.activation_checkpointing={level}",
            {"activation_checkpointing": level},
            "the forward once more in backward" if level == "full" else "parts of the forward once more",
        )
    if setup.batch_size > 1:
        half = setup.batch_size // 2
        accumulate = -(-setup.accumulate * setup.batch_size // half)
        yield (
            f"data.batch_size={half} trainer.accumulate_grad_batches={accumulate}",
            {"batch_size": half, "accumulate": accumulate},
            "the same step in more micro-batches",
        )
    half = setup.sequence_length // 2
    yield f"data.sequence_length={half}", {"sequence_length": half}, "longer rows are left out"
    if setup.device_type == "cuda" and materialises_scores(setup):
        yield "attention=flex", {"attention": "flex"}, "no score for every pair of tokens in memory"
        if setup.precision != "32-true":
            yield "attention=flash", {"attention": "flash"}, "the same; needs the package flash-attn"
    if setup.dispatch == "all_to_all" and setup.transport == "native":
        yield "moe.dispatch.transport=bf16", {"transport": "bf16"}, "also halves fp32 rows on the wire"


def _of_states(setup: Setup) -> Iterator[Candidate]:
    if setup.device_type == "cuda" and setup.precision == "32-true":
        yield "trainer.precision=bf16-mixed", {"precision": "bf16-mixed"}, "fp32 weights stay"
    # DeepSpeed keeps fp32 weights behind bf16 ones in its stages 1 and 2
    if setup.precision != "bf16-true" and (setup.strategy != "deepspeed" or setup.zero_stage in (1, 2)):
        yield "trainer.precision=bf16-true", {"precision": "bf16-true"}, "fp32 weights in the optimizer only"
    if setup.optimizer == "adamw" and not setup.offload_optimizer and setup.zero_stage != 3:
        yield "optim=muon", {"optimizer": "muon"}, "another optimizer: one average of a matrix, not two"
    for stage in (1, 2, 3) if setup.num_ranks > 1 else ():
        is_possible = stage < 3 or (
            setup.ep_size == 1
            and setup.optimizer == "adamw"
            and setup.precision != "bf16-true"
            and not setup.offload_optimizer
        )
        if stage > setup.zero_stage and is_possible:
            chosen = "" if setup.strategy == "deepspeed" else "trainer/strategy=deepspeed "
            yield (
                f"{chosen}trainer.strategy.stage={stage}",
                {"strategy": "deepspeed", "stage": stage},
                "what ZeRO shares, over all ranks",
            )
    can_offload = setup.device_type == "cuda" and setup.optimizer == "adamw"
    if setup.zero_stage in (1, 2) and can_offload and not setup.offload_optimizer:
        yield (
            "trainer.strategy.offload_optimizer=true",
            {"offload_optimizer": True},
            "states and steps on the host, slower",
        )
    if setup.zero_stage and setup.bucket_size > _SMALL_BUCKET:
        yield (
            f"trainer.strategy.bucket_size={_SMALL_BUCKET}",
            {"bucket_size": _SMALL_BUCKET},
            "smaller reductions",
        )
    if setup.compute not in ("native", "reference"):
        yield "moe/compute=native", {"compute": "native"}, "no copies of the experts"


def _of_ranks(setup: Setup) -> Iterator[Candidate]:
    stage = setup.zero_stage if setup.zero_stage in (1, 2) else 1
    experts = {"strategy": "deepspeed", "stage": stage, "dispatch": several_ranks_dispatch(setup)}
    more = ""
    if setup.ep_size == 1:
        strategy = "" if setup.strategy == "deepspeed" else " trainer/strategy=deepspeed"
        more = f"{strategy} trainer.strategy.stage={stage} moe/dispatch={experts['dispatch']}"
    double = setup.ep_size * 2
    if setup.num_ranks % double == 0 and setup.model.num_experts % double == 0:
        yield (
            f"trainer.strategy.ep_size={double}{more}",
            {**experts, "ep_size": double},
            "experts over more ranks",
        )
    if setup.zero_stage:
        yield (
            f"trainer.devices={setup.num_ranks * 2}",
            {"num_ranks": setup.num_ranks * 2},
            "in all nodes together; the same experts a rank",
        )
        if setup.model.num_experts % double == 0 and setup.ep_size > 1:
            yield (
                f"trainer.devices={setup.num_ranks * 2} trainer.strategy.ep_size={double}",
                {"num_ranks": setup.num_ranks * 2, "ep_size": double},
                "in all nodes together",
            )


def several_ranks_dispatch(setup: Setup) -> str:
    """The chosen dispatch, or where one rank has all experts the one that needs nothing else."""
    return setup.dispatch if setup.dispatch != "local" else "all_to_all"
