"""The model's shape is that of the run, read from small files."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from afmoe.checkpoint.config_file import write_config
from afmoe.config import ModelConfig, RunConfig, TokenizerConfig
from afmoe.data.tokenizer import load_tokenizer
from afmoe.errors import ConfigError
from afmoe.planning.shape_of_run import planned_shape, tokenizer_length
from tests.planning.small_model import config


def test_the_length_of_the_embedded_tokenizer_is_that_of_transformers() -> None:
    directory = files("afmoe.data") / "assets" / "byte_tokenizer"
    assert tokenizer_length(directory) == len(load_tokenizer(None)) == 267


def test_added_tokens_count_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None)
    tokenizer.add_tokens(["<one>", "<two>", "a"])
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_length(tmp_path) == len(AutoTokenizer.from_pretrained(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        tokenizer_length(tmp_path / "nothing")


def test_a_checkpoint_gives_the_shape_and_its_tokenizer_may_grow_it(tmp_path: Path) -> None:
    import torch

    load_tokenizer(None).save_pretrained(tmp_path)
    write_config(config(vocab_size=200), tmp_path, "hf", torch.float32)
    run = RunConfig(model=ModelConfig(pretrained=str(tmp_path)))
    with pytest.raises(ConfigError, match="267 tokens, the checkpoint's vocab_size is 200"):
        planned_shape(run)
    run.tokenizer = TokenizerConfig(resize=True)
    shape = planned_shape(run)
    assert (shape.vocab_size, shape.hidden_size, shape.num_experts) == (267, 64, 8)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 200
    run.model.explicit = ["hidden_size"]
    with pytest.raises(ConfigError, match="contradicts"):
        planned_shape(run)
