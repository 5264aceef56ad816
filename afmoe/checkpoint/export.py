"""What a run hands on: model, tokenizer, chat template and generation settings in one directory.

In layout `hf` it is what transformers' `AutoModelForCausalLM`, `AutoTokenizer` and `pipeline` load.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from afmoe.checkpoint.config_file import CONFIG, config_fields, write_json
from afmoe.checkpoint.model_directory import DOCUMENTS, GENERATION_CONFIG, replaced_model_directory
from afmoe.checkpoint.pretrained import ModelTensors, storage_dtype, write_model
from afmoe.errors import ConfigError
from afmoe.model import AfmoeForCausalLM


def export_run(
    model: AfmoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    layout: str = "hf",
    *,
    end_of_turn_id: int | None = None,
    tensors: ModelTensors | None = None,
) -> None:
    """Write `directory` whole or not at all, in place of an older export there.

    `tensors`: the model's, where it does not hold all of them itself.

    The ids that begin, end and fill a text are the tokenizer's, whatever the model's config said: the end
    is what the model was trained to write, the tokenizer's stop token and `end_of_turn_id` where the chat
    template ends a turn with another. Raises `ConfigError` when the tokenizer has more tokens than the
    model, no stop token, or when transformers cannot express the model in layout `hf`.
    """
    vocab_size = model.config.vocab_size
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {vocab_size}"
        )
    stop_ids = [token for token in (tokenizer.eos_token_id, end_of_turn_id) if token is not None]
    if not stop_ids:
        raise ConfigError("the tokenizer names no stop token; set `eos_token` in its tokenizer_config.json")
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": stop_ids[0] if len(set(stop_ids)) == 1 else stop_ids,
        "pad_token_id": stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    }
    fields = config_fields(dataclasses.replace(model.config, **ids), layout, storage_dtype(model))
    # greedy unless a person asks for sampling: transformers' pipeline samples where nothing is said
    generation = {**ids, "do_sample": False, "transformers_version": version("transformers")}
    with replaced_model_directory(Path(directory), DOCUMENTS) as temporary:
        write_model(tensors or ModelTensors(model), temporary, layout)
        write_json(temporary / CONFIG, fields)
        write_json(
            temporary / GENERATION_CONFIG,
            {name: value for name, value in generation.items() if value is not None},
        )
        tokenizer.save_pretrained(temporary)
