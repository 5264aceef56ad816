"""Exports: what transformers makes of them, and what a crash leaves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from afmoe.checkpoint.directory import remove_leftovers
from afmoe.checkpoint.export import export_run
from afmoe.checkpoint.pretrained import load_pretrained
from afmoe.config import AfmoeConfig
from afmoe.data.tokenizer import load_tokenizer
from afmoe.errors import ConfigError
from afmoe.model import AfmoeForCausalLM

SMALL = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    # large enough for logits that differ
    "initializer_range": 0.2,
}


def make_model(**fields):
    return AfmoeForCausalLM(AfmoeConfig(**SMALL | fields), attention="reference", compute="reference")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_the_pipeline_writes_the_tokens_that_our_generate_writes(tmp_path, tokenizer):
    torch.manual_seed(1)
    model = make_model(mup_enabled=True).eval()
    with torch.no_grad():
        for block in model.model.layers[1:]:
            block.mlp.router.selection_bias.normal_(std=0.3)
    export_run(model, tokenizer, tmp_path / "export")

    prompt = "the quick brown fox jumps"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    ours = model.generate(ids, 40, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ours = ours[0, ids.shape[1] :].tolist()
    # past the window, and not one token over and over
    assert len(ours) > 16
    assert len(set(ours)) > 8

    write = pipeline("text-generation", str(tmp_path / "export"))
    # older pipelines draw where nothing else is said
    theirs = write(prompt, max_new_tokens=40, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    assert theirs[ids.shape[1] :] == ours

    messages = [{"role": "user", "content": "Reverse: abc"}]
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    chat = again.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ours = model.generate(chat.input_ids, 20, eos_token_id=tokenizer.eos_token_id)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export").generate(**chat, max_new_tokens=20)
    assert torch.equal(theirs, ours)


def test_the_tokenizer_comes_back_with_its_template(tmp_path, tokenizer):
    export_run(make_model(), tokenizer, tmp_path / "export")
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert again.special_tokens_map == tokenizer.special_tokens_map
    text = "<|im_start|>user\nh\u00e9llo<|im_end|>\n"
    assert again(text).input_ids == tokenizer(text).input_ids


def test_the_ids_that_begin_end_and_fill_are_the_tokenizers(tmp_path, tokenizer):
    export_run(make_model(eos_token_id=1, pad_token_id=2), tokenizer, tmp_path / "export")
    expected = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / "export" / name).read_text())
        assert {key: fields[key] for key in expected} == expected
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.generation_config.do_sample is False
    assert model.generation_config.eos_token_id == expected["eos_token_id"]


def test_a_template_that_ends_a_turn_with_another_token_stops_at_both(tmp_path, tokenizer):
    export_run(make_model(), tokenizer, tmp_path / "export", end_of_turn_id=258)
    assert load_pretrained(tmp_path / "export").config.eos_token_id == [tokenizer.eos_token_id, 258]


def test_an_export_is_trained_on_again_with_the_same_loss(tmp_path, tokenizer):
    model = make_model()
    export_run(model, tokenizer, tmp_path / "export")
    ids = torch.randint(0, 256, (2, 30))
    again = load_pretrained(tmp_path / "export", attention="reference", compute="reference")
    assert torch.equal(again(ids, labels=ids).loss, model(ids, labels=ids).loss)


def test_more_tokens_than_the_model_has_are_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="the tokenizer has 267 tokens, the model's vocab_size is 200"):
        export_run(make_model(vocab_size=200), tokenizer, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_what_transformers_cannot_express_is_exported_canonical_only(tmp_path, tokenizer):
    model = make_model(score_func="softmax")
    with pytest.raises(ConfigError, match=r"score_func=sigmoid, .* choose layout canonical"):
        export_run(model, tokenizer, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
    export_run(model, tokenizer, tmp_path / "export", layout="canonical")
    assert load_pretrained(tmp_path / "export").config.score_func == "softmax"


def test_an_older_export_is_replaced_as_a_whole(tmp_path, tokenizer):
    export_run(make_model(), tokenizer, tmp_path / "export")
    (tmp_path / "export" / "special_tokens_map.json").write_text('{"eos_token": "stale"}')
    (tmp_path / "export" / "README.md").write_text("mine")
    export_run(make_model(), tokenizer, tmp_path / "export")
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert "special_tokens_map.json" not in names
    assert "README.md" in names
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_crash_around_the_replacement_leaves_a_whole_export_at_the_next_start(tmp_path, tokenizer, moment):
    export = tmp_path / "export"
    older, newer = make_model(), make_model()
    export_run(older, tokenizer, export)
    if moment == "before":
        (tmp_path / ".export.new").mkdir()
        (tmp_path / ".export.new" / "model.safetensors").write_text("half")
    else:
        export.rename(tmp_path / ".export.old")
        if moment == "after":
            export_run(newer, tokenizer, tmp_path / "elsewhere")
            (tmp_path / "elsewhere").rename(export)
        else:
            (tmp_path / ".export.new").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    expected = (newer if moment == "after" else older).lm_head.weight
    assert torch.equal(load_pretrained(export).lm_head.weight, expected)


def test_a_killed_exporter_leaves_a_whole_export(tmp_path):
    code = """
        import sys, torch
        from afmoe.checkpoint.export import export_run
        from afmoe.config import AfmoeConfig
        from afmoe.data.tokenizer import load_tokenizer
        from afmoe.model import AfmoeForCausalLM
        config = AfmoeConfig(hidden_size=32, vocab_size=300, num_hidden_layers=2, num_experts=8)
        model, tokenizer = AfmoeForCausalLM(config), load_tokenizer()
        while True:
            model.model.embed_tokens.weight.data += 1
            model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
            export_run(model, tokenizer, sys.argv[1] + "/export")
            print("again", flush=True)
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    assert writer.stdout.readline() == "again\n", writer.stderr.read()
    time.sleep(random.uniform(0.0, 0.2))
    writer.kill()
    writer.communicate()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    model = load_pretrained(tmp_path / "export")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    AutoTokenizer.from_pretrained(tmp_path / "export")
