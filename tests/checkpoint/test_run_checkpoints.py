"""Run checkpoints: exact, plain, whole or not there, whatever kills the writer."""

from __future__ import annotations

import collections
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from afmoe.checkpoint.directory import (
    checkpoint_name,
    checkpoints_directory,
    newest_checkpoint,
    prune,
    remove_leftovers,
    whole_checkpoints,
)
from afmoe.checkpoint.lightning_io import RunCheckpointIO
from afmoe.checkpoint.run import read_checkpoint, write_checkpoint
from afmoe.errors import ConfigError, MachineError


def small_state(value: float = 1.0, **more):
    embed = torch.full((4, 3), value)
    weights = {
        "model.model.embed_tokens.weight": embed,
        "model.model.layers.1.mlp.router.selection_bias": torch.full((2,), value),
        "model.model.norm.weight": torch.full((3,), value).bfloat16(),
        "model.lm_head.weight": embed,
        "metric.total": torch.tensor(7),
    }
    return {"state_dict": weights, "epoch": 1, "global_step": 5, **more}


def directory_of(run, step):
    return checkpoints_directory(run) / checkpoint_name(step)


def test_a_checkpoint_comes_back_exactly(tmp_path):
    optimizer = {"state": {0: {"exp_avg": torch.randn(3), "step": torch.tensor(5.0)}}, "betas": (0.9, 0.95)}
    state = small_state(optimizer_states=[optimizer], callbacks={"a": {"best": None, "names": ["x"]}})
    write_checkpoint(directory_of(tmp_path, 5), state)
    loaded = read_checkpoint(directory_of(tmp_path, 5))

    assert loaded.keys() == state.keys()
    assert loaded["state_dict"].keys() == state["state_dict"].keys()
    for key, tensor in state["state_dict"].items():
        assert loaded["state_dict"][key].dtype == tensor.dtype
        assert torch.equal(loaded["state_dict"][key], tensor)
    again = loaded["optimizer_states"][0]
    assert torch.equal(again["state"][0]["exp_avg"], optimizer["state"][0]["exp_avg"])
    assert again["betas"] == (0.9, 0.95)
    assert loaded["callbacks"] == state["callbacks"]


def test_weights_lie_under_canonical_names_and_tied_ones_once(tmp_path):
    directory = directory_of(tmp_path, 5)
    write_checkpoint(directory, small_state())
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {
            "model.embed_tokens.weight",
            "model.layers.1.mlp.router.selection_bias",
            "model.norm.weight",
        }
        assert file.get_tensor("model.layers.1.mlp.router.selection_bias").dtype == torch.float32
    assert (directory.parent / "last").read_text() == "step-000005\n"
    assert json.loads((directory / "complete").read_text())["versions"]["torch"] == torch.__version__


def test_the_state_file_holds_nothing_that_could_run(tmp_path):
    state = small_state(
        ordered=collections.OrderedDict(a=1), numbers=[np.float32(0.5), np.int64(3)], size=torch.Size([2, 3])
    )
    write_checkpoint(directory_of(tmp_path, 5), state)
    loaded = torch.load(directory_of(tmp_path, 5) / "training_state.pt", weights_only=True)
    assert loaded["ordered"] == {"a": 1}
    assert loaded["numbers"] == [0.5, 3]
    assert [type(number) for number in loaded["numbers"]] == [float, int]
    assert loaded["size"] == (2, 3)
    assert type(loaded["size"]) is tuple


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Path("somewhere"), "pathlib.PosixPath"),
        ({1, 2}, "builtins.set"),
        (np.zeros(2), "numpy.ndarray"),
        (pickle.Pickler, "builtins.type"),
        (signal.SIGTERM, "signal.Signals"),
    ],
)
def test_other_objects_are_refused_with_the_way_to_them(tmp_path, value, name):
    with pytest.raises(ConfigError) as caught:
        write_checkpoint(directory_of(tmp_path, 5), small_state(callbacks={"mine": [0, value]}))
    assert f"checkpoint['callbacks']['mine'][1] is a {name}" in str(caught.value)
    assert whole_checkpoints(tmp_path) == []


def test_a_view_is_saved_without_the_storage_behind_it(tmp_path):
    write_checkpoint(directory_of(tmp_path, 5), small_state(view=torch.zeros(1_000_000)[:2]))
    assert (directory_of(tmp_path, 5) / "training_state.pt").stat().st_size < 100_000


def test_whole_checkpoints_are_listed_by_step(tmp_path):
    for step in (1_000_000, 20, 3):
        write_checkpoint(directory_of(tmp_path, step), small_state())
    assert [step for step, _ in whole_checkpoints(tmp_path)] == [3, 20, 1_000_000]
    assert newest_checkpoint(tmp_path) == directory_of(tmp_path, 1_000_000)


def test_no_checkpoint_is_no_error(tmp_path):
    assert whole_checkpoints(tmp_path) == []
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_what_is_not_whole_is_skipped(tmp_path):
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(directory_of(tmp_path, step), small_state())
    (directory_of(tmp_path, 20) / "complete").unlink()
    (directory_of(tmp_path, 30) / "complete").write_text('{"step": 3')
    os.truncate(directory_of(tmp_path, 40) / "model.safetensors", 10)
    directory_of(tmp_path, 50).rename(directory_of(tmp_path, 60))
    (checkpoints_directory(tmp_path) / ".step-000070.new").mkdir()
    (checkpoints_directory(tmp_path) / "notes").write_text("mine")
    (checkpoints_directory(tmp_path) / "last").write_text("step-000099\n")
    assert [step for step, _ in whole_checkpoints(tmp_path)] == [10]
    with pytest.raises(ConfigError, match="step-000040 is no whole checkpoint"):
        read_checkpoint(directory_of(tmp_path, 40))


def test_leftovers_are_removed_and_the_rest_is_kept(tmp_path):
    directory = checkpoints_directory(tmp_path)
    write_checkpoint(directory_of(tmp_path, 10), small_state())
    write_checkpoint(directory_of(tmp_path, 20), small_state())
    directory_of(tmp_path, 20).rename(directory / ".step-000020.old")
    for name in (".step-000030.new", ".step-000005.gone", ".step-000010.old"):
        (directory / name).mkdir()
        (directory / name / "model.safetensors").write_text("half")
    (directory / "notes").write_text("mine")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == [
        "last",
        "notes",
        "step-000010",
        "step-000020",
    ]
    assert [step for step, _ in whole_checkpoints(tmp_path)] == [10, 20]


def test_prune_keeps_the_newest(tmp_path):
    for step in (10, 20, 30):
        write_checkpoint(directory_of(tmp_path, step), small_state())
    assert prune(tmp_path, 2) == [directory_of(tmp_path, 10)]
    assert [step for step, _ in whole_checkpoints(tmp_path)] == [20, 30]
    with pytest.raises(ConfigError, match="keep_last must be at least 1, got 0"):
        prune(tmp_path, 0)


def test_a_checkpoint_can_be_written_again(tmp_path):
    write_checkpoint(directory_of(tmp_path, 5), small_state(1.0))
    write_checkpoint(directory_of(tmp_path, 5), small_state(2.0))
    assert read_checkpoint(directory_of(tmp_path, 5))["state_dict"]["model.lm_head.weight"][0, 0] == 2.0
    assert sorted(path.name for path in checkpoints_directory(tmp_path).iterdir()) == ["last", "step-000005"]


def test_a_directory_without_a_step_in_its_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="named after its step, like step-000100"):
        write_checkpoint(tmp_path / "epoch=0.ckpt", small_state())


def run_python(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_writer_leaves_only_whole_checkpoints(tmp_path):
    code = """
        import sys, itertools, torch
        from pathlib import Path
        from afmoe.checkpoint.directory import checkpoint_name, prune
        from afmoe.checkpoint.run import write_checkpoint
        print("ready", flush=True)
        for step in itertools.count(1):
            weights = {"model.embed_tokens.weight": torch.full((200, 500), float(step))}
            state = {"state_dict": weights, "global_step": step}
            state["optimizer"] = [torch.full((100_000,), float(step))]
            write_checkpoint(Path(sys.argv[1]) / "checkpoints" / checkpoint_name(step), state)
            prune(sys.argv[1], 2)
    """
    writer = run_python(code, tmp_path)
    assert writer.stdout is not None
    assert writer.stderr is not None
    assert writer.stdout.readline() == "ready\n", writer.stderr.read()
    deadline = time.monotonic() + 60
    while newest_checkpoint(tmp_path) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0.0, 0.2))
    writer.kill()
    writer.communicate()

    remove_leftovers(tmp_path)
    found = whole_checkpoints(tmp_path)
    assert found
    for step, path in found:
        state = read_checkpoint(path)
        assert state["global_step"] == step
        assert torch.equal(
            state["state_dict"]["model.embed_tokens.weight"], torch.full((200, 500), float(step))
        )
        assert torch.equal(state["optimizer"][0], torch.full((100_000,), float(step)))
    names = {path.name for path in checkpoints_directory(tmp_path).iterdir()}
    assert names <= {"last", *(path.name for _, path in found)}


def test_a_full_disk_is_a_clear_error_and_keeps_the_older_checkpoint(tmp_path):
    code = """
        import resource, sys, torch
        from pathlib import Path
        from afmoe.checkpoint.run import write_checkpoint
        from afmoe.errors import MachineError
        weights = {"model.embed_tokens.weight": torch.zeros(100, 1000)}
        # the first limit stops the weights, the second the training state
        for limit in (30_000, 600_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write_checkpoint(sys.argv[1], {"state_dict": weights, "optimizer": torch.zeros(200_000)})
            except MachineError as error:
                print(error)
                print(sorted(path.name for path in Path(sys.argv[1]).parent.iterdir()))
    """
    write_checkpoint(directory_of(tmp_path, 5), small_state())
    output, errors = run_python(code, directory_of(tmp_path, 6)).communicate()
    lines = output.splitlines()
    assert len(lines) == 4, errors
    for message, names in (lines[:2], lines[2:]):
        assert "step-000006 could not be written: File too large (" in message
        assert "GiB free on that disk); nothing was changed there" in message
        assert names == "['last', 'step-000005']"
    assert newest_checkpoint(tmp_path) == directory_of(tmp_path, 5)


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(
        MachineError, match=r"step-000005 could not be written: (File exists|Not a directory)"
    ):
        write_checkpoint(directory_of(tmp_path, 5), small_state())


def test_the_directory_side_needs_no_torch():
    code = "import afmoe.checkpoint.directory, sys; print('torch' in sys.modules)"
    assert run_python(code).communicate()[0] == "False\n"


class Counter(pl.LightningModule):
    """A model whose every part has a state: weights, a buffer, momentum, a schedule, one dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.model = nn.Module()
        self.model.model.embed_tokens = nn.Embedding(4, 3)
        self.model.register_buffer("selection_bias", torch.zeros(4))

    def training_step(self, batch, index):
        self.model.selection_bias += 1e-3
        return self.model.model.embed_tokens(torch.arange(4)).square().sum() * (1 + self.global_step)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(list(range(4)), batch_size=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
                "interval": "step",
            },
        }


def fit(max_steps, run, ckpt_path=None):
    torch.manual_seed(3)
    module = Counter()
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[RunCheckpointIO()],
        default_root_dir=run,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning")
def test_the_trainer_saves_and_resumes_through_it_bit_for_bit(tmp_path):
    undisturbed, _ = fit(7, tmp_path)
    _, trainer = fit(3, tmp_path)
    directory = directory_of(tmp_path, 3)
    trainer.save_checkpoint(directory)
    assert newest_checkpoint(tmp_path) == directory

    resumed, trainer = fit(7, tmp_path, ckpt_path=directory)
    assert trainer.global_step == 7
    for key, tensor in undisturbed.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], tensor), key
    trainer.strategy.remove_checkpoint(directory)
    assert whole_checkpoints(tmp_path) == []
