"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from afmoe.errors import ConfigError
from afmoe.registry import build, configure


def factors(name: str, total_steps: int, **options: Any) -> list[float]:
    factor = build(configure("scheduler", {"name": name, **options})).factor(total_steps)
    return [factor(step) for step in range(total_steps + 1)]


def test_wsd_goes_up_stays_and_goes_down() -> None:
    found = factors("wsd", 400)
    assert found[:20] == [(step + 1) / 20 for step in range(20)]
    assert found[20:241] == [1.0] * 221
    assert found[241:] == [left / 160 for left in range(159, -1, -1)]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("linear", lambda done: 1 - done),
        ("sqrt", lambda done: 1 - math.sqrt(done)),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
    ],
)
def test_decay_shapes_are_the_published_ones(shape: str, wanted: Any) -> None:
    found = factors("wsd", 100, warmup_steps=0, decay_steps=40, decay_shape=shape, minimum_ratio=0.1)
    assert found[:61] == [1.0] * 61
    for step in range(60, 101):
        assert found[step] == pytest.approx(0.1 + 0.9 * wanted((step - 60) / 40), abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_linear_and_cosine_go_down_from_the_end_of_the_warmup_to_the_minimum(name: str) -> None:
    found = factors(name, 200, warmup_steps=10, minimum_ratio=0.2)
    assert found[9] == 1.0
    assert found[10] == 1.0
    assert found == [*found[:10], *sorted(found[10:], reverse=True)]
    assert found[105] == pytest.approx(0.6), "half-way down"
    assert found[200] == pytest.approx(0.2)
    assert factors(name, 200, warmup_steps=10)[200] == pytest.approx(0.0 if name == "linear" else 0.1)


def test_constant_stays() -> None:
    assert factors("constant", 50, warmup_steps=5) == [0.2, 0.4, 0.6, 0.8, *[1.0] * 47]
    assert factors("constant", 50, warmup_steps=0) == [1.0] * 51


def test_lengths_are_given_in_steps_or_as_a_share_of_the_run() -> None:
    by_share = factors("wsd", 200, warmup_fraction=0.1, decay_fraction=0.25)
    assert by_share == factors("wsd", 200, warmup_steps=20, decay_steps=50)
    # steps that a short run has no room for are cut to a tenth of it; a share is what it is
    assert factors("constant", 30)[:4] == [1 / 3, 2 / 3, 1.0, 1.0]
    assert factors("constant", 30, warmup_fraction=0.5)[14] == 1.0
    assert factors("constant", 30, warmup_fraction=0.5)[13] < 1.0


def test_a_decay_begins_at_the_end_of_the_warmup_at_the_earliest() -> None:
    found = factors("wsd", 100, warmup_steps=10, decay_fraction=1.0)
    assert found[9:11] == [1.0, 1.0]
    assert found == [*found[:10], *sorted(found[10:], reverse=True)]


def test_lengths_that_do_not_fit_into_the_run_are_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"scheduler.decay_steps=95 does not fit .* 90 of its 100 steps"):
        factors("wsd", 100, warmup_steps=10, decay_steps=95)
    with pytest.raises(ConfigError, match="together are more than the run"):
        configure("scheduler", {"name": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.6})
    factors("constant", 100)
    assert not caplog.records
    factors("constant", 100, warmup_steps=30)
    assert "warmup_steps=30 is more than a tenth of the run's 100 steps and cut to 10" in caplog.text


def test_constant_alone_needs_no_length() -> None:
    needs = {
        name: build(configure("scheduler", name)).needs_length
        for name in ("constant", "linear", "cosine", "wsd")
    }
    assert needs == {"constant": False, "linear": True, "cosine": True, "wsd": True}
    assert build(configure("scheduler", {"name": "constant", "warmup_fraction": 0.1})).needs_length


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("warmup_steps", -1, "must not be negative"),
        ("warmup_fraction", 1.5, r"must lie in \[0, 1\]"),
        ("decay_fraction", 1.5, r"must lie in \[0, 1\]"),
        ("decay_steps", -1, "must not be negative"),
        ("decay_shape", "exponential", "must be one of linear, sqrt, cosine"),
        ("minimum_ratio", -0.1, r"must lie in \[0, 1\]"),
    ],
)
def test_impossible_lengths_are_refused(option: str, value: Any, bound: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.{option} {bound}"):
        configure("scheduler", {"name": "wsd", option: value})
