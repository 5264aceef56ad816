"""What a rank takes of the host's memory to make its model: its own experts, never those of the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from afmoe.checkpoint.pretrained import save_pretrained
from afmoe.config import AfmoeConfig
from afmoe.model import AfmoeForCausalLM
from afmoe.planning.memory import memory_parts
from afmoe.planning.parts import START
from tests.planning.small_model import config, setup_of

ROOT = Path(__file__).parents[2]
CODE = """
import json, resource, sys, threading, time
from pathlib import Path

import torch

from afmoe.checkpoint.pretrained import load_pretrained
from afmoe.model import AfmoeForCausalLM
from afmoe.moe.block import hold_experts
from tests.planning.test_host_memory import large_enough

def drawn(experts):
    with torch.device("meta"):
        model = AfmoeForCausalLM(large_enough())
    hold_experts(model, experts)
    model.to_empty(device="cpu").init_weights()
    return model

def read(layout, experts):
    return load_pretrained(Path(sys.argv[1]) / layout, expert_range=experts)

own = range(2, 4)
ways = {
    "drawn": lambda: drawn(own),
    "hf": lambda: read("hf", own),
    "canonical": lambda: read("canonical", own),
    "all drawn": lambda: drawn(None),
}

def anonymous():
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return resource.getpagesize() * (resident - shared)

def watch():
    while True:
        seen.append(anonymous())
        time.sleep(0.0005)

seen = []
threading.Thread(target=watch, daemon=True).start()
drawn(own)
for name, make in ways.items():
    before = anonymous()
    seen.clear()
    model = make()
    print(json.dumps([name, max(*seen, anonymous()) - before]))
    del model
"""


def large_enough() -> AfmoeConfig:
    """85 MB of experts: what else a process takes is little."""
    return config(hidden_size=384, moe_intermediate_size=384, num_experts=16)


def planned(model: AfmoeConfig, ep_size: int) -> int:
    setup = setup_of(model, num_ranks=64, strategy="deepspeed", stage=2, device_type="cuda")
    return sum(part.num_bytes for part in memory_parts(setup.but(ep_size=ep_size)) if part.when == START)


def test_a_rank_takes_what_was_planned_to_make_its_model(tmp_path: Path) -> None:
    model = AfmoeForCausalLM(large_enough())
    for layout in ("hf", "canonical"):
        save_pretrained(model, tmp_path / layout, layout)
    # freed memory goes back at once
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, env=env)
    assert child.returncode == 0, child.stderr
    measured = dict(map(json.loads, child.stdout.splitlines()))
    own = planned(large_enough(), ep_size=8)
    # measured: drawn 0.89, read 0.78 and 0.69
    for way in ("drawn", "hf", "canonical"):
        assert measured[way] <= 1.08 * own, way
    # a control, measured 3.1
    assert measured["all drawn"] > 2.5 * own


def test_the_documented_table_is_what_the_formula_gives() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for name in ("trinity_nano", "trinity_mini", "trinity_large"):
        fields = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
        del fields["pretrained"], fields["revision"]
        model = AfmoeConfig(**fields | {"vocab_size": 200192})
        cells = [f"{planned(model, ep_size) / 2**30:,.1f}" for ep_size in (1, 8, 16, 64)]
        assert f"| {name} | {' | '.join(cells)} |" in text
