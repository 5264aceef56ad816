"""A mistake ends in one clear line and exit code 1, before torch is loaded where torch is not needed."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipe.conftest import RECIPE, TINY, Result

# overrides -> what the line has to say
WITHOUT_TORCH: dict[str, tuple[str, ...]] = {
    "model=afmoe_mni": ("unknown model=afmoe_mni", "afmoe_mini", "trinity_nano"),
    "modle=afmoe_mini": ("unknown key modle", "model"),
    "moe/compute=fp9": ("unknown moe/compute=fp9", "fp8"),
    "moe/comptue=fp8": ("unknown group moe/comptue", "moe/compute"),
    "callbacks=[load_balnce]": ("unknown callbacks=load_balnce", "load_balance"),
    "experiment=smok": ("unknown experiment=smok", "smoke"),
    "moe.compute=fp8": ("choose the group with a slash: moe/compute=fp8",),
    "trainer.strategy=ddp": ("choose the group with a slash: trainer/strategy=ddp",),
    "model.num_exprts=8": ("no `num_exprts` in model", "num_experts"),
    "trainer.max_stps=3": ("no `max_stps` in trainer", "max_steps"),
    "+trainer.gradient_clip_val=1": ("unknown key trainer.gradient_clip_val",),
    "+nonsense=1": ("unknown key nonsense",),
    "model.num_experts=many": ("model.num_experts takes a whole number", "many"),
    "data.batch_size=0.5": ("data.batch_size takes a whole number", "0.5"),
    "optim.lr=fast": ("optim.lr takes a number", "fast"),
    "trainer.enable_progress_bar=maybe": ("takes true or false", "maybe"),
    "data=5": ("must be a string or a list",),
    "trainer": ("cannot read this override", "key=value"),
    "model.num_experts_per_tok=99": ("num_experts_per_tok must lie in [1, num_experts=8]", "99"),
    "model.num_key_value_heads=3": ("num_key_value_heads must divide num_attention_heads=4", "3"),
    "trainer.precision=fp8": ("trainer.precision must be one of", "bf16-mixed"),
    "trainer.accumulate_grad_batches=0": ("must be at least 1, got 0",),
    "data.max_length=0": ("data.min_length must lie in [1, max_length=0]", "3"),
    "data.train_files=[x.jsonl]": ("no `train_files`", "data=jsonl"),
    "trainer.strategy.ep_size=2": ("no `ep_size`", "trainer/strategy=deepspeed"),
    "moe.dispatch.transport=bf16": ("no `transport`", "moe/dispatch=all_to_all"),
    "data=jsonl": ("data.train_files is not given",),
    "data=jsonl data.train_files=[missing.jsonl]": ("no file missing.jsonl",),
    "hydra.run.dir=file.txt/run": ("file.txt/run", "choose another folder"),
    "moe.compute.compiled.x=1": ("moe.compute.compiled is a value and has no fields",),
    "run_name.x=1": ("run_name is a value and has no fields",),
    "moe/compute=[fp8,native]": ("moe/compute needs one option", "fp8, mxfp8, native"),
    "~moe/compute": ("moe/compute needs one option",),
    "resume=nowhere": ("resume=nowhere", "no such directory"),
}

BLOCKED = """
import importlib.util, json, sys
for name in ("torch", "lightning", "transformers"):
    sys.modules[name] = None
spec = importlib.util.spec_from_file_location("sft", sys.argv[1])
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
for mistake in json.loads(sys.argv[2]):
    print("#", mistake, file=sys.stderr, flush=True)
    sys.argv = ["sft.py", *mistake.split()]
    try:
        recipe.main()
    except SystemExit as stop:
        print("code", stop.code, file=sys.stderr, flush=True)
"""


def test_mistakes_are_answered_in_one_line_without_torch(tmp_path: Path) -> None:
    (tmp_path / "file.txt").touch()
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(RECIPE), json.dumps(list(WITHOUT_TORCH))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = {}
    for part in done.stderr.split("# ")[1:]:
        mistake, *lines = part.strip().splitlines()
        answers[mistake] = lines
    assert answers.keys() == WITHOUT_TORCH.keys()
    for mistake, words in WITHOUT_TORCH.items():
        line, code = answers[mistake]
        assert code == "code 1", mistake
        assert line.startswith("error: "), line
        assert all(word in line for word in words), (mistake, line)
    # nothing was left behind by runs that never began
    assert {path.name for path in tmp_path.rglob("*")} <= {"file.txt", "outputs"}


def test_a_mistake_ends_a_process_with_code_1(sft_process: Callable[..., Result]) -> None:
    result = sft_process("model.num_exprts=8")
    assert (result.code, result.out) == (1, "")
    assert len(result.err.splitlines()) == 1


def test_the_trace_is_there_for_those_who_ask(
    sft: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    from afmoe.errors import ConfigError

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match="resume=nowhere"):
        sft("resume=nowhere")


def one_error_line(result: Result) -> str:
    assert result.code == 1
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_second_process_on_a_run_folder_is_refused(sft: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "a"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 1 on elsewhere")
        lock.flush()
        line = one_error_line(sft(*TINY, "run_name=a"))
    assert "in use by process 1 on elsewhere" in line
    # a lock file that nobody holds any more is no obstacle
    assert sft(*TINY, "run_name=a", "dry_run=true").code == 0


def test_values_that_torch_has_to_judge_are_one_line_too(sft: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\nnot json\n')
    (tmp_path / "empty").mkdir()
    mistakes = {
        "optim.lr=-1.0": "optim.lr must be positive and finite, got -1.0",
        "scheduler.decay_fraction=2.0": "scheduler.decay_fraction must lie in [0, 1], got 2.0",
        "model.hidden_act=sillu": "sillu",
        "model.vocab_size=10": "model.vocab_size=10 is smaller than the tokenizer",
        "model.pretrained=empty": "empty",
        "tokenizer.path=empty": "no tokenizer in empty",
        "model.score_func=other export.enabled=false": "score_func=other",
        "model.hidden_size=65536 model.moe_intermediate_size=65536 model.num_experts=512": "needs at least",
        "trainer.max_steps=-1": "needs the length of the run",
        "export.layout=hff": "unknown export.layout=hff; choose one of: hf",
        "model.score_func=softmax": "export.enabled=false",
        "trainer.accelerator=gpu": "trainer.accelerator=gpu",
        "attention=flex trainer.accelerator=cpu": "attention=flex cannot train on a CPU",
        "attention=flash trainer.accelerator=cpu": "attention=flash needs a CUDA GPU",
    }
    tiny = {override.split("=", 1)[0]: override for override in TINY}
    for mistake, words in mistakes.items():
        overrides = {**tiny, **{override.split("=", 1)[0]: override for override in mistake.split()}}
        assert words in one_error_line(sft(*overrides.values(), "run_name=x")), mistake
    files = [override for override in TINY if not override.startswith("data.num_")]
    assert "bad" in one_error_line(sft(*files, "run_name=x", "data=jsonl", "data.train_files=bad.jsonl"))
