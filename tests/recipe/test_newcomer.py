"""What a newcomer ran into: values that comments promise, figures of a diverged run, odd and torn files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipe.conftest import TINY, Result


@pytest.mark.filterwarnings("ignore:Encountered .nan. values")
def test_a_diverged_run_does_not_report_a_perfect_loss(sft: Callable[..., Result]) -> None:
    """A metric that leaves NaN out of its sums makes 0.0 of them, which a sweep would take for the best."""
    result = sft(
        *TINY, "run_name=nan", "optim.lr=1e30", "optim.gradient_clip=null", "checkpoint.every_n_steps=0"
    )
    path = Path("outputs/nan/metrics.json")
    loss = json.loads(path.read_text()).get("val/loss") if path.exists() else None
    assert result.code == 1 or loss is None or loss != loss or loss > 1.0, loss


def test_a_cut_epoch_still_makes_whole_optimizer_steps(sft: Callable[..., Result]) -> None:
    result = sft(
        *TINY,
        "run_name=cut",
        "trainer.limit_train_batches=3",
        "trainer.accumulate_grad_batches=2",
        "trainer.max_steps=4",
    )
    if result.code == 1:
        assert "limit_train_batches" in result.err
        return
    assert Path("outputs/cut/checkpoints/step-000004/complete").is_file()


@pytest.mark.parametrize("override", ["trainer.devices=[0]", "trainer.val_check_interval=0.5"])
def test_what_the_comment_of_a_key_offers_is_taken(sft: Callable[..., Result], override: str) -> None:
    result = sft(*TINY, "dry_run=true", override)
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "trainer.devices=0",
        "trainer.devices=abc",
        "trainer.max_time=abc",
        "trainer.profiler=abc",
        "trainer.val_check_interval=0",
        "trainer.check_val_every_n_epoch=0",
        "trainer.limit_train_batches=abc",
        "trainer.limit_val_batches=-1",
        "trainer.overfit_batches=null",
    ],
)
def test_an_impossible_value_is_one_line_that_names_the_key(
    sft: Callable[..., Result], override: str
) -> None:
    result = sft(*TINY, override)
    assert result.code == 1
    assert override.split("=")[0].split(".")[-1] in result.err.splitlines()[-1]


def test_a_number_too_long_for_python_is_a_bad_row(sft: Callable[..., Result]) -> None:
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    Path("rows.jsonl").write_text(good + '{"n": ' + "9" * 5000 + "}\n", encoding="utf-8")
    overrides = [override for override in TINY if not override.startswith("data.num_")]
    result = sft(
        *overrides, "data=jsonl", "data.train_files=[rows.jsonl]", "data.max_bad_fraction=0.5", "dry_run=true"
    )
    assert result.code == 0, result.err


@pytest.mark.parametrize(("name", "content"), [("metrics.json", "{"), ("config.yaml", "{a: [")])
def test_a_torn_file_of_a_run_folder_is_one_line(sft: Callable[..., Result], name: str, content: str) -> None:
    assert sft(*TINY, "run_name=torn").code == 0
    (Path("outputs/torn") / name).write_text(content, encoding="utf-8")
    result = sft(*TINY, "run_name=torn")
    assert result.code == 1
    assert name in result.err
