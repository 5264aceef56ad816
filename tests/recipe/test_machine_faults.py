"""Disks and memory that fail, and damaged checkpoints: one line, or the previous whole checkpoint."""

from __future__ import annotations

import json
import pickletools
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from afmoe.checkpoint.directory import newest_checkpoint, whole_checkpoints
from tests.programs import load_program
from tests.recipe.conftest import RECIPE, TINY, Result
from tests.recipe.test_runs import assert_same_weights, metrics, weights

Run = Callable[..., Result]
SLOW = pytest.mark.slow


def run_limited(folder: Path, limit: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The recipe in a process of its own, in which `limit` is called before training starts."""
    code = f"""
        import resource, runpy, sys
        import lightning.pytorch as pl
        fit = pl.Trainer.fit
        def limited(*args, **kwargs):
            {limit}
            return fit(*args, **kwargs)
        pl.Trainer.fit = limited
        sys.argv = [{str(RECIPE)!r}, *sys.argv[1:]]
        runpy.run_path({str(RECIPE)!r}, run_name="__main__")
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *TINY, *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line_and_the_checkpoint_before_stays(sft: Run, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "a"
    assert sft(*TINY, "run_name=a", "trainer.max_steps=2", "export.enabled=false").code == 0
    # smaller than any checkpoint, larger than what is logged
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))"
    stopped = run_limited(tmp_path, limit, "run_name=a", "export.enabled=false")
    assert stopped.returncode == 1
    assert "Traceback" not in stopped.stderr
    line = stopped.stderr.strip().splitlines()[-1]
    assert "checkpoints/step-000004 could not be written: File too large" in line
    assert "GiB free on that disk" in line
    assert [step for step, _ in whole_checkpoints(run)] == [2]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000002", "last"}
    assert metrics(run)["status"] == "failed"
    resumed = sft(*TINY, "run_name=a")
    assert resumed.code == 0
    assert "from step 2" in resumed.out + resumed.err


@pytest.mark.slow
def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"
    stopped = run_limited(tmp_path, limit, "run_name=a")
    assert stopped.returncode == 1
    assert "Traceback" not in stopped.stderr
    assert "could not be written: File too large" in stopped.stderr.splitlines()[-1]


@pytest.mark.slow
def test_out_of_memory_is_one_line_with_figures_and_settings(tmp_path: Path) -> None:
    # what the process has mapped by then, and little more; one step needs gigabytes
    limit = (
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))"
    )
    large = ["data.batch_size=256", "data.sequence_length=512", "model.vocab_size=20000"]
    stopped = run_limited(tmp_path, limit, "run_name=a", "data.num_train_rows=20000", *large)
    assert stopped.returncode == 1, stopped.stderr
    assert "Traceback" not in stopped.stderr
    line = stopped.stderr.strip().splitlines()[-1]
    assert line.startswith("error: out of memory on the CPU")
    for text in (
        "GiB more: this process has used up to",
        "are free",
        "its limit (ulimit -v) is",
        "data.batch_size=256",
        "trainer.accumulate_grad_batches=1",
        "data.sequence_length=512",
        "memory.activation_checkpointing=full",
        "memory.loss_chunk_tokens",
    ):
        assert text in line, text
    assert metrics(tmp_path / "outputs" / "a")["status"] == "failed"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        ("model.safetensors", flip_a_bit, "model.safetensors is damaged: its checksum is another"),
        ("complete", Path.unlink, "the file `complete` is missing"),
        pytest.param("training_state.pt", flip_a_bit, "training_state.pt is damaged", marks=SLOW),
        pytest.param("training_state.pt", truncate, "instead of", marks=SLOW),
        pytest.param("model.safetensors", Path.unlink, "model.safetensors is missing", marks=SLOW),
        pytest.param("complete", truncate, None, marks=SLOW),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_taken(
    finished: Path, sft: Run, tmp_path: Path, name: str, harm: Callable[[Path], None], reason: str | None
) -> None:
    run = tmp_path / "outputs" / "a"
    shutil.copytree(finished, run)
    harm(run / "checkpoints" / "step-000004" / name)
    resumed = sft(*TINY, "run_name=a", "trainer.max_steps=6", "scheduler=constant", "export.enabled=false")
    assert resumed.code == 0, resumed.err
    said = resumed.out + resumed.err
    if reason is None:
        # the marker's last byte is the end of a line
        assert "from step 4" in said
        return
    assert reason in said
    assert "passed over for step-000002" in said
    assert "from step 2" in said
    assert_same_weights(weights(finished.with_name("whole")), weights(run))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints; beside it the same of six steps, called `whole`."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, steps in (("a", 4), ("whole", 6)):
            overrides = [f"run_name={name}", f"trainer.max_steps={steps}", "scheduler=constant"]
            patch.setattr(sys, "argv", ["sft.py", *TINY, *overrides, "export.enabled=false"])
            load_program(RECIPE).main()
    return folder / "outputs" / "a"


def test_without_a_whole_checkpoint_a_run_does_not_begin_again_by_itself(
    finished: Path, sft: Run, tmp_path: Path
) -> None:
    run = tmp_path / "outputs" / "a"
    shutil.copytree(finished, run)
    settings = [*TINY, "run_name=a", "trainer.max_steps=6", "scheduler=constant", "export.enabled=false"]
    flip_a_bit(run / "checkpoints" / "step-000002" / "training_state.pt")
    truncate(run / "checkpoints" / "step-000004" / "model.safetensors")
    for _ in range(2):
        refused = sft(*settings)
        assert refused.code == 1
        assert "no checkpoint of outputs/a is whole" in refused.err
        assert "step-000002: training_state.pt is damaged" in refused.err
        assert "resume=never overwrite=true" in refused.err
    elsewhere = sft(*settings, "run_name=b", "resume=outputs/a/checkpoints/step-000002")
    assert elsewhere.code == 1
    assert "training_state.pt is damaged" in elsewhere.err

    for checkpoint in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    refused = sft(*settings)
    assert refused.code == 1
    assert "last names step-000004, and no checkpoint is left" in refused.err
    assert sft(*settings, "resume=never", "overwrite=true").code == 0


def test_a_runs_files_hold_nothing_that_could_run(finished: Path) -> None:
    """Every file of a run is text, safetensors, TensorBoard's, or loads with `weights_only=True`."""
    known = {".json", ".jsonl", ".yaml", ".log", ".safetensors", ".pt", ""}
    for path in finished.rglob("*"):
        if path.is_dir() or path.parent.name == "tensorboard":
            continue
        assert path.suffix in known, path
        if path.suffix == ".pt":
            torch.load(path, weights_only=True)
            assert pickled_names(path) <= {
                "collections OrderedDict",
                "torch FloatStorage",
                "torch LongStorage",
                "torch._utils _rebuild_tensor_v2",
            }
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                assert file.keys()
        elif path.suffix == ".json":
            json.loads(path.read_text())


def pickled_names(path: Path) -> set[str]:
    """What the pickle inside a torch file would import."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return {
            str(argument)
            for code, argument, _ in pickletools.genops(archive.read(name))
            if code.name in ("GLOBAL", "STACK_GLOBAL", "INST")
        }


def test_a_run_folder_that_cannot_be_made_is_one_line(sft: Run, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    refused = sft(*TINY, "run_name=a")
    assert refused.code == 1
    assert refused.err.strip().splitlines()[-1].startswith("error: ")
    assert "outputs" in refused.err
    assert newest_checkpoint(tmp_path / "outputs" / "a") is None
