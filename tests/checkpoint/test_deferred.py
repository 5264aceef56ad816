"""Tensors made as they are written: the same files, one tensor in memory at a time."""

from __future__ import annotations

import re
import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from afmoe.checkpoint.deferred import DeferredTensor, deferred_tensors
from afmoe.checkpoint.directory import checkpoint_name, checkpoints_directory
from afmoe.checkpoint.lightning_io import RunCheckpointIO
from afmoe.checkpoint.run import read_checkpoint, take_part, write_checkpoint
from afmoe.checkpoint.state_file import write_state
from afmoe.endings import NotSaved


class Maker:
    """Gives deferred tensors, and remembers what was made and what was alive when."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.most_alive = 0
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def deferred(self, name: str, tensor: Tensor) -> DeferredTensor:
        def make() -> Tensor:
            self.made.append(name)
            made = tensor.clone()
            self._alive.add(made)
            self.most_alive = max(self.most_alive, len(self._alive))
            return made

        return DeferredTensor(tuple(tensor.shape), tensor.dtype, make)

    def none(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


def states(tensor_of) -> dict:
    generator = torch.Generator().manual_seed(0)

    def one(name: str, *shape: int, dtype: torch.dtype = torch.float32):
        return tensor_of(name, torch.randn(shape, generator=generator).to(dtype))

    embedding = one("embedding", 40, 3)
    weights = {
        # not the model's: it goes to the other file, after everything else
        "metric.total": one("metric", 2),
        "model.model.embed_tokens.weight": embedding,
        "model.model.norm.weight": one("norm", 3, dtype=torch.bfloat16),
        "model.lm_head.weight": embedding,
    }
    moments = {
        number: {
            "step": torch.tensor(3.0),
            "exp_avg": one(f"exp_avg {number}", 5, 4),
            "exp_avg_sq": one(f"exp_avg_sq {number}", 5, 4),
            "empty": one(f"empty {number}", 0, 4),
        }
        for number in range(2)
    }
    groups = [{"name": "dense", "params": [0, 1], "lr": 0.1}]
    return {
        "state_dict": weights,
        "global_step": 5,
        "optimizer_states": [{"state": moments, "param_groups": groups}],
    }


ORDER = ["embedding", "norm"]
ORDER += [f"{key} {number}" for number in range(2) for key in ("exp_avg", "exp_avg_sq", "empty")]
ORDER += ["metric"]


def test_a_checkpoint_has_the_same_bytes_and_one_tensor_lives_at_a_time(tmp_path):
    maker = Maker()
    whole, deferred = (checkpoints_directory(tmp_path / kind) / checkpoint_name(5) for kind in "ab")
    write_checkpoint(whole, states(maker.none))
    write_checkpoint(deferred, states(maker.deferred))
    names = sorted(path.name for path in whole.iterdir())
    assert names == ["complete", "model.safetensors", "training_state.pt"]
    for name in names:
        assert (whole / name).read_bytes() == (deferred / name).read_bytes(), name
    assert maker.made == ORDER
    assert maker.most_alive == 1


def test_another_rank_makes_the_same_tensors_in_the_same_order():
    maker = Maker()
    take_part(states(maker.deferred))
    assert maker.made == ORDER
    assert maker.most_alive == 1


@pytest.mark.parametrize("bytes_left", [0, 300, 3000])
def test_on_a_full_disk_the_rank_that_writes_still_makes_what_the_others_make(tmp_path, bytes_left):
    path = checkpoints_directory(tmp_path) / checkpoint_name(5)
    maker = Maker()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
    try:
        with pytest.raises(NotSaved, match="File too large"):
            RunCheckpointIO().save_checkpoint(states(maker.deferred), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert maker.made == ORDER
    assert not list(path.parent.iterdir())


def test_the_state_file_is_the_one_of_torch(tmp_path):
    shared, turned = torch.randn(9), torch.randn(4, 6).t()
    real = {"a": [shared, (shared, 1.5, "x")], "b": turned, "c": {0: torch.arange(4), 1: torch.tensor(True)}}
    late = DeferredTensor((9,), torch.float32, lambda: torch.cat([shared, shared])[:9])
    with (tmp_path / "torch").open("wb") as file:
        torch.save(real, file)
    write_state(tmp_path / "real", real)
    write_state(tmp_path / "late", real | {"a": [late, (late, 1.5, "x")]})
    for name in ("real", "late"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "torch").read_bytes(), name
    assert list(deferred_tensors([late, {"again": (late,)}])) == [late]


def test_reading_takes_memory_for_what_is_looked_at(tmp_path):
    directory = checkpoints_directory(tmp_path) / checkpoint_name(5)
    numbers = torch.ones(2**24)
    weights = {"model.model.embed_tokens.weight": numbers}
    write_checkpoint(directory, {"state_dict": weights, "optimizer_states": [{"exp_avg": numbers}]})
    before = _resident_bytes()
    state = read_checkpoint(directory)
    assert _resident_bytes() - before < 2**24
    for tensor in (
        state["state_dict"]["model.model.embed_tokens.weight"],
        state["optimizer_states"][0]["exp_avg"],
    ):
        assert tensor[2**22 : 2**22 + 2**20].sum() == 2**20
    # of 128 MiB the two slices of 4, and what the system reads ahead
    assert _resident_bytes() - before < 2**25


def _resident_bytes() -> int:
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
