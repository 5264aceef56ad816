"""scripts/convert_checkpoint.py: any layout into any other, whole or not at all, and its mistakes."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from small_checkpoint import (
    SCRIPTS,
    assert_bitwise,
    edit,
    run_script,
    save_small,
    small_model,
    tensors_of,
)
from transformers import AutoModelForCausalLM

from afmoe.checkpoint import convert as convert_module
from afmoe.checkpoint.layouts import LAYOUTS, convert
from afmoe.checkpoint.pretrained import load_pretrained, save_pretrained
from afmoe.checkpoint.tensor_file import TensorWriter

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
BIAS = "model.layers.1.mlp.expert_bias"

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")


def converted(*arguments):
    return run_script("convert_checkpoint", *arguments)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_every_layout_becomes_every_other_bitwise(tmp_path, source, target, capsys):
    there = save_small(tmp_path / "there", source, num_shared_experts=2)
    assert converted(there, tmp_path / "copy", "--layout", target, "--check") == 0
    assert f"{source} -> {target} (float32)" in capsys.readouterr().out
    assert_bitwise(tensors_of(tmp_path / "copy"), convert(tensors_of(there), source, target))
    assert converted(tmp_path / "copy", tmp_path / "back", "--layout", source) == 0
    assert_bitwise(tensors_of(tmp_path / "back"), tensors_of(there))
    assert load_pretrained(tmp_path / "copy").config == load_pretrained(there).config


@pytest.mark.parametrize(
    "fields", [{"tie_word_embeddings": True}, {"num_shared_experts": 0}, {"num_dense_layers": 4}]
)
def test_a_conversion_writes_what_save_pretrained_writes(tmp_path, fields):
    model = small_model(**fields)
    for layout in LAYOUTS:
        save_pretrained(model, tmp_path / layout, layout)
        source = tmp_path / "hf"
        assert converted(source, tmp_path / f"{layout}_converted", "--layout", layout, "--check") == 0
        assert_bitwise(tensors_of(tmp_path / f"{layout}_converted"), tensors_of(tmp_path / layout))
        for name in ("config.json", "generation_config.json"):
            texts = [(tmp_path / f"{layout}{end}" / name).read_text() for end in ("", "_converted")]
            assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_rounds_everything_but_the_selection_bias(tmp_path, dtype, capsys):
    model = small_model()
    save_pretrained(model, tmp_path / "source", "canonical")
    assert (
        converted(tmp_path / "source", tmp_path / "copy", "--layout", "hf", "--dtype", dtype, "--check") == 0
    )
    assert f"bitwise equal to the source, rounded to {dtype}" in capsys.readouterr().out
    tensors = tensors_of(tmp_path / "copy")
    wide = {key for key, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert wide == {key for key in tensors if key.endswith("expert_bias")}
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["dtype"] == dtype
    save_pretrained(model, tmp_path / "saved", "hf", getattr(torch, dtype))
    assert_bitwise(tensors, tensors_of(tmp_path / "saved"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto").dtype == getattr(
        torch, dtype
    )


def test_a_widened_copy_holds_the_same_values(tmp_path, capsys):
    save_pretrained(small_model(), tmp_path / "source", "prime", torch.bfloat16)
    assert (
        converted(
            tmp_path / "source", tmp_path / "copy", "--layout", "canonical", "--dtype", "float32", "--check"
        )
        == 0
    )
    assert "bitwise equal to the source\n" in capsys.readouterr().out
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "copy").values()} == {torch.float32}


def test_a_value_too_large_for_float16_is_refused_by_name(tmp_path, capsys):
    source = save_small(tmp_path / "source")
    edit(source, lambda state: state | {GATE: state[GATE].index_fill(0, torch.tensor([2]), 1e5)})
    assert converted(source, tmp_path / "copy", "--layout", "hf", "--dtype", "float16") == 1
    assert f"{GATE} holds 1e+05, too large for float16; choose bfloat16 or float32" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_tokenizer_and_settings_come_along_and_code_does_not(tmp_path, capsys):
    source = save_small(tmp_path / "source")
    for name, text in {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"temperature": 0.5}',
        "modeling_afmoe.py": "raise SystemExit",
    }.items():
        (source / name).write_text(text)
    config = json.loads((source / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "modeling_afmoe.AfmoeModel"}, "use_grouped_mm": True}
    (source / "config.json").write_text(json.dumps(config))
    assert converted(source, tmp_path / "copy", "--layout", "canonical") == 0
    assert "not copied: modeling_afmoe.py" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        ".prime-v1",
        "chat_template.jinja",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert "auto_map" not in (tmp_path / "copy" / "config.json").read_text()
    marker = json.loads((tmp_path / "copy" / "conversion.json").read_text())
    assert (marker["layout"], marker["source_layout"], marker["source"]) == ("canonical", "hf", str(source))


def test_shards_are_as_small_as_asked(tmp_path):
    source = save_small(tmp_path / "source")
    assert (
        converted(source, tmp_path / "copy", "--layout", "hf_fused", "--max-shard-size", "30KB", "--check")
        == 0
    )
    shards = list((tmp_path / "copy").glob("model-*-of-*.safetensors"))
    assert len(shards) > 4
    assert_bitwise(tensors_of(tmp_path / "copy"), convert(tensors_of(source), "hf", "hf_fused"))


def test_nan_is_reported_by_the_tensor_that_holds_it(tmp_path, capsys):
    source = save_small(tmp_path / "source")
    edit(source, lambda state: state | {GATE: state[GATE].index_fill(1, torch.tensor([0, 1]), torch.nan)})
    assert converted(source, tmp_path / "copy", "--layout", "hf", "--check") == 0
    output = capsys.readouterr().out
    assert "bitwise equal to the source" in output
    assert f"not finite: {GATE} (32 NaN)" in output


def test_a_bias_in_bf16_is_written_in_fp32_and_a_trainers_counters_are_left_out(tmp_path, capsys):
    source = save_small(tmp_path / "source")
    counters = "model.layers.1.mlp.tokens_per_expert"
    edit(source, lambda state: state | {BIAS: state[BIAS].bfloat16(), counters: torch.zeros(11)})
    assert converted(source, tmp_path / "copy", "--layout", "prime", "--check") == 0
    assert f"a trainer's state: {counters}" in capsys.readouterr().out
    assert tensors_of(tmp_path / "copy")[BIAS].dtype == torch.float32
    assert counters not in tensors_of(tmp_path / "copy")


def test_a_model_without_selection_bias_gets_a_zero_one_and_is_told(tmp_path, capsys):
    source = save_small(tmp_path / "source", "prime")
    edit(source, lambda state: {key: value for key, value in state.items() if "expert_bias" not in key})
    assert converted(source, tmp_path / "copy", "--layout", "hf", "--check") == 0
    assert "no selection bias: 3 were written as zero" in capsys.readouterr().out
    assert torch.equal(tensors_of(tmp_path / "copy")[BIAS], torch.zeros(11))


def test_a_read_only_source_makes_a_writable_copy_and_stays_untouched(tmp_path):
    source = save_small(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    assert converted(source, tmp_path / "copy", "--layout", "hf_fused", "--check") == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()} == before
    source.chmod(0o755)
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "copy").iterdir())


def test_nothing_is_overwritten_without_force_and_only_a_model_with_it(tmp_path, capsys):
    source, copy = save_small(tmp_path / "source"), tmp_path / "copy"
    assert converted(source, copy, "--layout", "canonical") == 0
    before = {path: path.read_bytes() for path in copy.iterdir()}
    assert converted(source, copy, "--layout", "hf") == 1
    assert capsys.readouterr().err.endswith("copy is not empty; --force replaces a model there\n")
    assert {path: path.read_bytes() for path in copy.iterdir()} == before
    assert converted(source, copy, "--layout", "hf", "--force") == 0
    assert_bitwise(tensors_of(copy), tensors_of(source))
    assert not (copy / ".prime-v1").exists()
    (copy / "thesis.tex").write_text("years of work")
    assert converted(source, copy, "--layout", "hf", "--force") == 1
    assert "holds thesis.tex, no part of a model" in capsys.readouterr().err
    assert converted(source, source, "--layout", "hf", "--force") == 1
    assert "is SOURCE itself" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "source"]


FAULTS = {
    "key too many": (
        lambda state: state | {"model.layers.1.mlp.extra": torch.zeros(1)},
        "1 unexpected: model.layers.1.mlp.extra (in model.safetensors)",
    ),
    "key missing": (lambda state: {k: v for k, v in state.items() if k != GATE}, f"1 missing: {GATE}"),
    "wrong shape": (
        lambda state: state | {GATE: torch.zeros(8, 32)},
        f"1 misshapen: {GATE} (in model.safetensors: [8, 32], config says [16, 32])",
    ),
    "two biases": (
        lambda state: state | {"model.layers.1.mlp.router.selection_bias": torch.zeros(11)},
        "two selection biases",
    ),
    "another model": (
        lambda state: {"transformer.h.0.attn.weight": torch.zeros(2)},
        "no layout of AFMoE",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_weights_that_do_not_fit_are_named_and_nothing_is_written(tmp_path, name, capsys):
    change, message = FAULTS[name]
    source = save_small(tmp_path / "source")
    edit(source, change)
    assert converted(source, tmp_path / "copy", "--layout", "canonical") == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_truncated_and_a_missing_shard_are_named(tmp_path, capsys):
    source = tmp_path / "source"
    save_pretrained(small_model(), source, max_shard_size=30_000)
    shard = sorted(source.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 100)
    assert converted(source, tmp_path / "copy", "--layout", "hf") == 1
    assert f"{shard.name} is truncated or no safetensors file" in capsys.readouterr().err
    shard.unlink()
    assert converted(source, tmp_path / "copy", "--layout", "hf") == 1
    assert f"{shard.name} is missing; " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "hff"], "argument --layout: invalid choice: 'hff'"),
        ([], "the following arguments are required: --layout"),
        (["--layout", "hf", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--layout", "hf", "--max-shard-size", "much"], "--max-shard-size: must be a size like 500MB"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, message, capsys):
    source = save_small(tmp_path / "source")
    assert converted(source, tmp_path / "copy", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_source_that_is_not_there_is_one_line(tmp_path, capsys):
    assert converted(tmp_path / "nowhere", tmp_path / "copy", "--layout", "hf") == 1
    assert "nowhere is no directory" in capsys.readouterr().err


def test_what_transformers_cannot_express_is_refused_for_its_layouts(tmp_path, capsys):
    source = save_small(tmp_path / "source", "canonical", norm_order="cast_then_scale")
    assert converted(source, tmp_path / "copy", "--layout", "hf") == 1
    assert "choose layout canonical" in capsys.readouterr().err
    assert converted(source, tmp_path / "copy", "--layout", "prime") == 0


def test_a_full_disk_leaves_nothing_or_the_older_model(tmp_path):
    code = """
        import resource, runpy, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        sys.argv = sys.argv[1:]
        destinations = [sys.argv.pop(), sys.argv.pop()]
        for destination in destinations:
            sys.argv[2] = destination
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                print(end.code)
    """
    source, older, new = save_small(tmp_path / "source"), tmp_path / "older", tmp_path / "new"
    assert converted(source, older, "--layout", "canonical") == 0
    before = {path: path.read_bytes() for path in older.iterdir()}
    options = [source, "DESTINATION", "--layout", "hf_fused", "--force", older, new]
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), SCRIPTS / "convert_checkpoint.py", *options],
        capture_output=True,
        text=True,
    )
    assert child.stdout == "1\n1\n", child.stderr
    # the free space that follows is the machine's
    assert [line.split(" (")[0] for line in child.stderr.splitlines()] == [
        f"error: {place} could not be written: File too large" for place in (new, older)
    ]
    assert {path: path.read_bytes() for path in older.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older", "source"]


def test_more_than_the_disk_has_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    source = save_small(tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6, 200_000))
    assert converted(source, tmp_path / "copy", "--layout", "canonical") == 1
    assert "copy needs 0.00 GB, 0.00 GB are free there; free some space" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_larger_than_the_memory_is_one_line(tmp_path, capsys):
    # sparse: 8 TB that take no place, which no machine maps privately or has free
    source = save_small(tmp_path / "source")
    rows = 8 * 10**12 // 32 // 4
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": rows}
    (source / "config.json").write_text(json.dumps(config))
    specs = {key: tensor.to("meta") for key, tensor in tensors_of(source).items()}
    specs["model.embed_tokens.weight"] = torch.empty(rows, 32, device="meta")
    (source / "model.safetensors").unlink()
    TensorWriter(source, specs, max_shard_size=1 << 62)
    assert converted(source, tmp_path / "copy", "--layout", "canonical") == 1
    error = capsys.readouterr().err
    assert "(8000.0 GB) cannot be mapped into this machine's memory" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_copy_that_the_disk_gives_back_otherwise_is_never_put_in_place(tmp_path, monkeypatch, capsys):
    source = save_small(tmp_path / "source")

    def flip_a_bit(directory):
        path = directory / "model.safetensors"
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))

    monkeypatch.setattr(convert_module, "_forget", flip_a_bit)
    assert converted(source, tmp_path / "copy", "--layout", "canonical", "--check") == 1
    assert "what was read back is not what was written: model." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_help_and_a_conversion_load_no_transformers_and_help_no_torch(tmp_path):
    source = save_small(tmp_path / "source")
    code = """
        import runpy, sys
        sys.argv = sys.argv[1:]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        print("torch" in sys.modules, "transformers" in sys.modules, "afmoe.model" in sys.modules)
    """
    script = str(SCRIPTS / "convert_checkpoint.py")
    for arguments, loaded in (
        (["--help"], "False False False"),
        ([source, tmp_path / "copy", "--layout", "hf_fused", "--check"], "True False False"),
    ):
        command = [sys.executable, "-c", textwrap.dedent(code), script, *map(str, arguments)]
        child = subprocess.run(command, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        assert child.stdout.splitlines()[-1] == loaded


def test_the_script_knows_every_layout():
    assert set(runpy.run_path(str(SCRIPTS / "convert_checkpoint.py"))["LAYOUTS"]) == set(LAYOUTS)
