"""What several ranks cannot do is said before anything is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.recipe.conftest import TINY, Result, sft  # noqa: F401 (a fixture)

SHARED = [
    *TINY,
    "trainer.accelerator=cpu",
    "trainer/strategy=deepspeed",
    "trainer.devices=2",
    "trainer.strategy.ep_size=2",
    "moe/dispatch=all_to_all",
    "dry_run=true",
]


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (["trainer.strategy.ep_size=3", "trainer.devices=4"], ["ep_size=3 must divide", "ranks, which is 4"]),
        (["model.num_experts=5"], ["ep_size=2 must divide model.num_experts=5"]),
        (["trainer.strategy.stage=0"], ["ep_size=2 works with trainer.strategy.stage=1 or 2, got stage=0"]),
        (["trainer.strategy.stage=3"], ["ep_size=2 works with trainer.strategy.stage=1 or 2, got stage=3"]),
        (["trainer.strategy.stage=4"], ["stage must be 0, 1, 2 or 3, got 4"]),
        (["moe/dispatch=local"], ["moe/dispatch=local", "use moe/dispatch=all_to_all"]),
        (["trainer.strategy.process_group_backend=nccl"], ["process_group_backend=nccl needs GPUs"]),
        (
            ["trainer.strategy.ep_size=1", "trainer.strategy.stage=0", "trainer.precision=bf16-true"],
            ["bf16-true needs fp32 weights", "stage=0"],
        ),
        (["trainer.precision=16-mixed"], ["16-mixed"]),
        (["optim=muon", "trainer.strategy.offload_optimizer=true"], ["optim=muon works on whole matrices"]),
        (
            [
                "trainer.strategy.ep_size=1",
                "trainer.strategy.stage=3",
                "trainer.strategy.offload_optimizer=true",
            ],
            ["offload_optimizer=true works with trainer.strategy.stage=1 or 2, got stage=3"],
        ),
        (["trainer.strategy.timeout_seconds=0"], ["timeout_seconds must be at least 1, got 0"]),
    ],
    ids=lambda value: value[0][-40:],
)
def test_refused_in_one_line(
    sft: Callable[..., Result],  # noqa: F811
    overrides: list[str],
    reasons: list[str],
) -> None:
    result = sft(*SHARED, *overrides)
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.err
    for reason in reasons:
        assert reason in errors[0]


def test_what_is_not_refused_passes_the_dry_run(sft: Callable[..., Result]) -> None:  # noqa: F811
    result = sft(*SHARED)
    assert result.code == 0, result.err
