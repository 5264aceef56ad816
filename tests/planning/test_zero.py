"""Shares and traffic under DeepSpeed as planned are those of two ranks that train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afmoe.planning.parts import STEP, total
from afmoe.planning.states import state_parts
from afmoe.planning.wire import traffic
from tests.parallel.launch import launch
from tests.planning.small_model import config, setup_of

SETUPS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 1, "ep_size": 2},
    {"stage": 2, "ep_size": 2, "accumulate": 2},
    {"stage": 2, "ep_size": 2, "precision": "bf16-true"},
    {"stage": 1, "ep_size": 2, "optimizer": "muon"},
    {"stage": 3},
]


@pytest.mark.slow
def test_shares_and_traffic_are_those_of_two_ranks(tmp_path: Path) -> None:
    changes = [
        {"num_ranks": 2, "strategy": "deepspeed", **one}
        | ({"dispatch": "all_to_all"} if one.get("ep_size") == 2 else {})
        for one in SETUPS
    ]
    (tmp_path / "setups.json").write_text(json.dumps(changes))
    worker = Path(__file__).parent / "zero_worker.py"
    launch(worker, str(tmp_path / "setups.json"), str(tmp_path), world_size=2, timeout_seconds=250)
    for rank in range(2):
        measured = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for change, real in zip(changes, measured, strict=True):
            setup = setup_of(config(), **change)
            planned = state_parts(setup)
            kept = [part for part in planned if part.when != STEP]
            for name in ("fp32 weights", "AdamW averages", "momentum"):
                assert total(kept, "optimizer", name) == real[name], (change, name)
            weights = total(planned, "weights") - total(planned, "weights", "buffers")
            if setup.stage < 3:
                assert weights == real["weights"], change
                sent = {kind.name: kind.num_bytes for kind in traffic(setup)}
                gradients = sent["dense gradients"] + sent.get("expert gradients", 0)
                assert gradients == pytest.approx(real["reduced"], rel=0.01), change
                assert sent["weights gathered"] == pytest.approx(real["gathered"], rel=0.01), change
