"""What the quick tests train, all in one launch: it takes 7 s to start, a case 1 s or 2."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.parallel.worker import Case


def zero(stage: int, ep_size: int = 1, **options: bool) -> dict[str, object]:
    """Options of the strategy."""
    return {"stage": stage, "ep_size": ep_size, "bucket_size": 100_000, **options}


def half(case: Case, folder: Path) -> Case:
    """The first two of four steps, then a checkpoint."""
    path = str(folder / case.name / "step-000002")
    return dataclasses.replace(case, name=f"half-{case.name}", steps=2, save_to=path)


def saved(case: Case, folder: Path) -> Case:
    """With a checkpoint after its last step."""
    return dataclasses.replace(case, save_to=str(folder / case.name / f"step-{case.steps:06d}"))


def rest(case: Case, source: str, folder: Path) -> Case:
    """The last two steps, from the checkpoint of another case."""
    path = str(folder / source / "step-000002")
    return dataclasses.replace(case, name=f"{source}-{case.name}", resume_from=path)


QUICK = [
    Case("z1-sgd", world_size=2, strategy=zero(1, 2), optimizer="sgd"),
    Case("z2-adamw-2", world_size=2, strategy=zero(2, 2), accumulate=2),
    Case("sgd-1x4", world_size=2, strategy=zero(1, 2), optimizer="sgd", batch_size=4),
    Case("sgd-4x1", world_size=2, strategy=zero(1, 2), optimizer="sgd", accumulate=4),
    Case("frozen", world_size=2, strategy=zero(1, 2), freeze=["*router*"], tied=True),
    Case("poisoned", 2, zero(2, 2), poisoned_step=1),
    Case("muon", 2, zero(1, 2), optimizer="muon"),
    Case("offload", world_size=2, strategy=zero(2, 2, offload_optimizer=True)),
    Case(
        "bf16",
        world_size=2,
        strategy=zero(2, 2, offload_optimizer=True),
        precision="bf16-true",
        fp32_router=True,
        poisoned_step=2,
        infinite_loss_step=3,
    ),
]
ALONE = Case("alone", batch_size=2)
SHARED = Case("shared", world_size=2, strategy=zero(1, 2))
ROUTER = Case("router", 2, zero(2, 2), precision="bf16-true", fp32_router=True)


def resumed(folder: Path) -> list[Case]:
    """Runs in halves."""
    return [
        SHARED,
        half(SHARED, folder),
        rest(SHARED, "shared", folder),
        rest(SHARED, "alone", folder),
        ROUTER,
        half(ROUTER, folder),
        rest(ROUTER, "router", folder),
    ]
