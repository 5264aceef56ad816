"""What lies in a model directory: markers, shapes from the config alone, one rank's slice of the experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from small_checkpoint import edit, save_small, small_model

from afmoe.checkpoint.config_file import read_config
from afmoe.checkpoint.layouts import LAYOUTS
from afmoe.checkpoint.model_files import ModelFiles
from afmoe.checkpoint.pretrained import load_pretrained, load_weights, save_pretrained
from afmoe.checkpoint.shapes import canonical_specs
from afmoe.checkpoint.tensor_file import TensorReader
from afmoe.errors import ConfigError
from afmoe.model import AfmoeForCausalLM
from afmoe.moe.block import hold_experts

VARIANTS = [
    {},
    {"tie_word_embeddings": True, "num_key_value_heads": None},
    {"num_shared_experts": 0, "attention_bias": True},
    {"num_shared_experts": 2, "num_dense_layers": 4},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_shapes_from_the_config_are_those_of_the_model(fields):
    model = small_model(**fields).bfloat16()
    state = model.state_dict()
    if fields.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    specs = canonical_specs(model.config, torch.bfloat16)
    assert {key: (spec.shape, spec.dtype) for key, spec in specs.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in state.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", [range(4), range(4, 11)])
def test_a_rank_loads_the_experts_that_it_holds(tmp_path, layout, experts):
    whole = small_model()
    save_pretrained(whole, tmp_path / "model", layout)
    with torch.device("meta"):
        model = AfmoeForCausalLM(whole.config, attention="reference", compute="reference")
    hold_experts(model, experts)
    model.to_empty(device="cpu")
    load_weights(model, tmp_path / "model")
    expected = whole.state_dict()
    for key, tensor in model.state_dict().items():
        held = expected[key][experts.start : experts.stop] if ".mlp.experts." in key else expected[key]
        assert torch.equal(tensor, held), key


def test_a_slice_of_the_experts_leaves_the_others_on_the_disk(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from afmoe.checkpoint.config_file import read_config
        from afmoe.checkpoint.model_files import ModelFiles
        from afmoe.checkpoint.shapes import canonical_specs

        def resident():
            rows = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
            return sum(int(row[1]) * 1024 for row in rows if row[0] in ("RssAnon:", "RssFile:"))

        for directory in map(Path, sys.argv[1:]):
            files = ModelFiles(directory, canonical_specs(read_config(directory)))
            files.read_layer(0, expert_range=range(0, 1))
            before = resident()
            two = files.read_layer(0, expert_range=range(4, 6))
            sum(tensor.sum().item() for tensor in two.values())
            after_two = resident()
            whole = files.read_layer(0)
            sum(tensor.sum().item() for tensor in whole.values())
            size = sum(spec.nbytes for spec in files.specs.values())
            print((after_two - before) / size, (resident() - before) / size)
            del files, two, whole
    """
    fields = {"num_hidden_layers": 1, "num_dense_layers": 0, "num_experts": 16}
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512}
    directories = [save_small(tmp_path / layout, layout, **fields, **sizes) for layout in LAYOUTS]
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *directories],
        capture_output=True,
        text=True,
        # freed memory goes back at once
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert child.returncode == 0, child.stderr
    for line in child.stdout.splitlines():
        two, whole = map(float, line.split())
        # measured: 0.31 of the file in `hf`, where two of 16 experts are read and stacked, 0.25 to 0.29 in
        # the others; 0.13 are no experts. The whole layer, as a control: 0.97 to 2.0
        assert two < 0.4
        assert whole > 0.8


def test_a_range_beyond_the_experts_is_our_own_mistake(tmp_path):
    directory = save_small(tmp_path / "model")
    files = ModelFiles(directory, canonical_specs(read_config(directory)))
    with pytest.raises(AssertionError, match="no slice of 11 experts"):
        files.read_layer(1, expert_range=range(8, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_primes_marker_means_canonical_and_must_agree_with_the_keys(tmp_path, layout):
    directory = save_small(tmp_path / "prime", layout)
    (directory / ".prime-v1").touch()
    if layout == "canonical":
        load_pretrained(directory)
        return
    message = rf"\.prime-v1 says layout canonical, but the weights' keys are {layout}; delete the marker"
    with pytest.raises(ConfigError, match=message):
        load_pretrained(directory)


def test_a_prime_cache_without_its_marker_is_prime_or_unfinished(tmp_path, caplog):
    save_small(tmp_path / "prime", "prime")
    load_pretrained(tmp_path / "prime")
    assert caplog.text == ""
    save_small(tmp_path / "prime", "canonical")
    load_pretrained(tmp_path / "prime")
    assert "looks like a cache of prime-rl, but has no .prime-v1: its conversion may not have" in caplog.text
    save_small(tmp_path / "elsewhere", "canonical")
    caplog.clear()
    load_pretrained(tmp_path / "elsewhere")
    assert caplog.text == ""


def test_our_own_marker_must_agree_with_the_keys_too(tmp_path):
    directory = save_small(tmp_path / "model", "hf")
    (directory / "conversion.json").write_text(json.dumps({"layout": "prime"}))
    with pytest.raises(
        ConfigError, match=r"conversion\.json says layout prime, but the weights' keys are hf"
    ):
        load_pretrained(directory)


def test_a_dense_model_fits_every_marker(tmp_path):
    directory = save_small(tmp_path / "model", "canonical", num_dense_layers=4)
    (directory / ".prime-v1").touch()
    load_pretrained(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_casts_everything_but_the_selection_bias(tmp_path, dtype):
    model = small_model()
    model.save_pretrained(tmp_path / "model", dtype=dtype)
    for key, spec in TensorReader(tmp_path / "model").specs().items():
        assert spec.dtype == (torch.float32 if key.endswith("expert_bias") else dtype)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] in str(dtype)
    again = load_pretrained(tmp_path / "model")
    for key, tensor in model.state_dict().items():
        rounded = tensor if key.endswith("selection_bias") else tensor.to(dtype).float()
        assert torch.equal(again.state_dict()[key], rounded), key
    assert model.lm_head.weight.dtype == torch.float32


def test_a_value_too_large_for_the_dtype_is_refused_and_nothing_written(tmp_path):
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3, 4] = -7e4
    with pytest.raises(ConfigError, match=r"lm_head\.weight holds 7e\+04, too large for float16"):
        save_pretrained(model, tmp_path / "model", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    model.lm_head.weight.data[3, 4] = torch.inf
    save_pretrained(model, tmp_path / "model", dtype=torch.float16)


def test_more_shards_than_open_files_are_allowed(tmp_path):
    code = """
        import resource, sys
        from small_checkpoint import small_model
        from afmoe.checkpoint.pretrained import save_pretrained
        model = small_model()
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        save_pretrained(model, sys.argv[1], max_shard_size=2_000)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path / "model"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=__file__.rpartition("/")[0])
    assert child.returncode == 0, child.stderr
    assert len(list((tmp_path / "model").glob("model-*"))) > 100
    load_pretrained(tmp_path / "model")


def test_edited_keys_keep_their_error_after_a_conversion(tmp_path):
    directory = save_small(tmp_path / "model")
    edit(directory, lambda state: {key: value for key, value in state.items() if ".layers.2." not in key})
    with pytest.raises(ConfigError, match=r"49 missing: model\.layers\.2\."):
        load_pretrained(directory)
