"""Model directories: equal to transformers' in both directions, strict, whole or not there."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AfmoeConfig as TransformersConfig
from transformers import AfmoeForCausalLM as TransformersModel
from transformers import AutoModelForCausalLM

from afmoe.checkpoint.config_file import write_config
from afmoe.checkpoint.layouts import LAYOUTS, convert
from afmoe.checkpoint.pretrained import load_pretrained, save_pretrained
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError, MachineError
from afmoe.model import AfmoeForCausalLM
from tests.checkpoint.small_checkpoint import FIELDS

VARIANTS = {
    "default": {},
    "tied": {"tie_word_embeddings": True, "mup_enabled": True},
    "no_shared_expert": {"num_shared_experts": 0},
    "two_shared_experts": {"num_shared_experts": 2, "attention_bias": True},
    "all_dense": {"num_dense_layers": 4},
    "stop_tokens": {"eos_token_id": [1, 3], "pad_token_id": 0, "bos_token_id": 2},
}
IDS = torch.arange(20).reshape(2, 10) % 61

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")


def their_model(fields):
    model = TransformersModel(TransformersConfig(**copy.deepcopy(FIELDS | fields))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "expert_bias" in name or "router" in name or name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def our_model(fields):
    model = AfmoeForCausalLM(
        AfmoeConfig(**copy.deepcopy(FIELDS | fields)), attention="reference", compute="reference"
    )
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                buffer.normal_(std=0.3)
    return model


def load(directory, **options):
    return load_pretrained(directory, attention="reference", compute="reference", **options)


@torch.no_grad()
def relative_error(ours, theirs):
    ours, theirs = ours(IDS).logits, theirs(IDS).logits
    return ((ours - theirs).norm() / theirs.norm()).item()


def table(directory):
    """Key to shape and dtype of everything in the safetensors files of a directory."""
    entries = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                view = file.get_slice(key)
                entries[key] = (view.get_shape(), view.get_dtype())
    return entries


@pytest.mark.parametrize("fused", [False, True], ids=["hf", "hf_fused"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_transformers_writes_loads_here_with_equal_logits(tmp_path, name, fused):
    theirs = their_model(VARIANTS[name])
    theirs.save_pretrained(tmp_path, save_original_format=not fused, max_shard_size="20KB")
    # measured: at most 5e-7
    assert relative_error(load(tmp_path), theirs) < 1e-5


@pytest.mark.parametrize("layout", ["hf", "hf_fused"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_we_write_is_what_transformers_writes_and_loads_there(tmp_path, name, layout):
    ours = our_model(VARIANTS[name])
    save_pretrained(ours, tmp_path / "ours", layout)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(theirs) is TransformersModel
    assert relative_error(ours, theirs) < 1e-5

    theirs.save_pretrained(tmp_path / "theirs", save_original_format=layout == "hf")
    assert table(tmp_path / "ours") == table(tmp_path / "theirs")
    for file in ("config.json", "generation_config.json"):
        written = [json.loads((tmp_path / side / file).read_text()) for side in ("ours", "theirs")]
        assert written[0] == written[1]
    names = [sorted(path.name for path in (tmp_path / side).iterdir()) for side in ("ours", "theirs")]
    assert names[0] == names[1]


def test_bf16_is_written_as_transformers_does_with_the_bias_in_fp32(tmp_path):
    our_model({}).bfloat16().save_pretrained(tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    theirs.save_pretrained(tmp_path / "theirs")
    expected = table(tmp_path / "theirs")
    if "expert_bias" not in (theirs._keep_in_fp32_modules_strict or ()):
        # before 5.24 transformers rounded the bias when it loaded it
        expected |= {key: ([11], "F32") for key in expected if key.endswith("expert_bias")}
    assert table(tmp_path / "ours") == expected
    assert table(tmp_path / "ours")["model.layers.1.mlp.expert_bias"] == ([11], "F32")

    again = load(tmp_path / "ours", dtype=torch.bfloat16)
    dtypes = {key: tensor.dtype for key, tensor in again.state_dict().items()}
    assert {key for key, dtype in dtypes.items() if dtype != torch.bfloat16} == {
        f"model.layers.{layer}.mlp.router.selection_bias" for layer in (1, 2, 3)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["default", "tied", "no_shared_expert"])
def test_every_layout_and_sharding_comes_back_bitwise(tmp_path, name, layout):
    model = our_model(VARIANTS[name])
    save_pretrained(model, tmp_path, layout, max_shard_size=7_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    again = AfmoeForCausalLM.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    if name == "tied":
        assert again.lm_head.weight is again.model.embed_tokens.weight


def test_shards_hold_at_most_what_was_asked_and_the_index_is_transformers(tmp_path):
    model = our_model({})
    save_pretrained(model, tmp_path / "ours", max_shard_size=20_000)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB"
    )
    theirs = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == theirs["metadata"]
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    for path in (tmp_path / "ours").glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 20_000


def test_an_embedding_cast_down_and_up_is_read_in_the_dtype_asked_for(tmp_path):
    model = our_model({})
    save_pretrained(model, tmp_path)
    loaded = load(tmp_path, dtype=torch.bfloat16).model.embed_tokens.weight
    assert torch.equal(loaded, model.model.embed_tokens.weight.bfloat16())


def test_a_model_without_selection_bias_starts_from_zero_and_says_so(tmp_path, caplog):
    model = our_model({})
    save_pretrained(model, tmp_path, "prime")
    edit(tmp_path, lambda state: {key: value for key, value in state.items() if "expert_bias" not in key})
    again = load(tmp_path)
    assert torch.equal(again.model.layers[1].mlp.router.selection_bias, torch.zeros(11))
    assert "holds no selection bias" in caplog.text


def edit(directory, change):
    save_file(change(load_file(directory / "model.safetensors")), directory / "model.safetensors")


def replaced(state, key, tensor):
    return state | {key: tensor}


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
PROBLEMS = {
    "missing expert": (lambda state: {k: v for k, v in state.items() if k != GATE}, f"1 missing: {GATE}"),
    "extra key": (
        lambda state: replaced(state, "model.layers.1.mlp.extra", torch.zeros(1)),
        r"1 unexpected: model.layers.1.mlp.extra \(in model.safetensors\)",
    ),
    "layer too many": (
        lambda state: replaced(state, "model.layers.9.input_layernorm.weight", torch.zeros(32)),
        "1 unexpected: model.layers.9.input_layernorm.weight",
    ),
    "wrong shape": (
        lambda state: replaced(state, GATE, torch.zeros(8, 32)),
        rf"1 misshapen: {GATE} \(in model.safetensors: \[8, 32\], config says \[16, 32\]\)",
    ),
    "integers": (
        lambda state: replaced(state, GATE, torch.zeros(16, 32, dtype=torch.int8)),
        rf"1 misshapen: {GATE} \(in model.safetensors: \[16, 32\] int8",
    ),
    "two biases": (
        lambda state: replaced(state, "model.layers.1.mlp.router.selection_bias", torch.zeros(11)),
        "two selection biases, model.layers.1.mlp.*keep one",
    ),
    "whole layer missing": (
        lambda state: {k: v for k, v in state.items() if ".layers.2." not in k},
        r"49 missing: model.layers.2.input_layernorm.weight, .*experts.10.gate_proj.weight, \.\.\.",
    ),
    "another model": (
        lambda state: {"transformer.h.0.attn.weight": torch.zeros(2)},
        "no layout of AFMoE .* has these keys: transformer.h.{n}.attn.weight",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_weights_that_do_not_fit_are_named(tmp_path, name):
    change, message = PROBLEMS[name]
    save_pretrained(our_model({}), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_head_that_contradicts_tied_embeddings_is_refused_and_an_equal_one_accepted(tmp_path):
    save_pretrained(our_model(VARIANTS["tied"]), tmp_path)
    edit(
        tmp_path, lambda state: replaced(state, "lm_head.weight", state["model.embed_tokens.weight"].clone())
    )
    load(tmp_path)
    edit(tmp_path, lambda state: replaced(state, "lm_head.weight", torch.zeros(61, 32)))
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is true, but lm_head\.weight is not equal"):
        load(tmp_path)


def test_truncated_and_missing_files_are_named(tmp_path):
    save_pretrained(our_model({}), tmp_path, max_shard_size=30_000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(ConfigError, match=rf"{shard.name} is truncated or no safetensors file"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(
        ConfigError, match=rf"{shard.name} is missing; .*model\.safetensors\.index\.json names it"
    ):
        load(tmp_path)
    shard.write_bytes((tmp_path / sorted(tmp_path.glob("model-*.safetensors"))[0].name).read_bytes())
    with pytest.raises(ConfigError, match=rf"is in both .* and {shard.name}"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no index of safetensors files"):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    save_pretrained(our_model({}), tmp_path, max_shard_size=30_000)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.3.input_layernorm.weight"] = content["weight_map"][
        "model.embed_tokens.weight"
    ]
    index.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"promises model\.layers\.3\.input_layernorm\.weight in .*, which does not hold it"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("__0_0.distcp", "is a distributed .* dcp_to_torch"),
        ("pytorch_model.bin", "pickled weights; only safetensors"),
        ("notes.txt", "holds neither model.safetensors nor"),
    ],
)
def test_other_formats_are_refused_with_a_way_out(tmp_path, file, message):
    write_config(AfmoeConfig(**FIELDS), tmp_path, "hf", torch.float32)
    (tmp_path / file).write_text("x")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_what_does_not_fit_in_memory_is_refused_before_reading_with_both_figures(tmp_path):
    # a billion experts a layer are 18 TB in fp32; there are no weights to read
    write_config(AfmoeConfig(**FIELDS | {"num_experts": 10**9}), tmp_path, "hf", torch.float32)
    with pytest.raises(MachineError, match=r"in float32 needs [\d.]+ GiB of memory, [\d.]+ GiB are free"):
        load(tmp_path)


def test_an_older_model_is_replaced_and_its_tokenizer_stays(tmp_path):
    save_pretrained(our_model({}), tmp_path / "model", max_shard_size=30_000)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_pretrained(our_model({}), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json",
        "generation_config.json",
        "model",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds thesis\.tex, no part of a model"):
        save_pretrained(our_model({}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_transformers_cannot_express_is_refused_before_anything_is_written(tmp_path):
    model = our_model({"norm_order": "cast_then_scale"})
    with pytest.raises(ConfigError, match=r"norm_order=scale_then_cast, .* choose layout canonical"):
        save_pretrained(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    save_pretrained(model, tmp_path / "model", "canonical")
    assert load(tmp_path / "model").config.norm_order == "cast_then_scale"


def test_a_full_disk_leaves_the_older_model(tmp_path):
    code = """
        import resource, sys
        from afmoe.config import AfmoeConfig
        from afmoe.errors import MachineError
        from afmoe.model import AfmoeForCausalLM
        config = AfmoeConfig(hidden_size=64, vocab_size=500, num_hidden_layers=1, num_experts=8)
        model = AfmoeForCausalLM(config)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            model.save_pretrained(sys.argv[1])
        except MachineError as error:
            print(error)
    """
    save_pretrained(our_model({}), tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "model")], capture_output=True, text=True
    )
    assert "model could not be written: File too large" in child.stdout, child.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_keys_of_a_meta_model_are_those_of_a_real_one():
    with torch.device("meta"):
        meta = our_model({})
    real = our_model({})
    for layout in LAYOUTS:
        shapes = [
            {key: tensor.shape for key, tensor in convert(model.state_dict(), "canonical", layout).items()}
            for model in (meta, real)
        ]
        assert shapes[0] == shapes[1]
