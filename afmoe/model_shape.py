"""Which shape a run's model has: the checkpoint's, or the preset's with the tokenizer's vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afmoe.config import AfmoeConfig, RunConfig
from afmoe.errors import ConfigError


def model_shape(
    run: RunConfig,
    num_tokens: int,
    special_ids: Mapping[str, Any],
    stored: AfmoeConfig | None = None,
    directory: Path | None = None,
) -> AfmoeConfig:
    """The model's config. `num_tokens`, `special_ids` (bos_token_id, ...): the tokenizer's; `stored`: the
    config in the checkpoint's `directory`.

    Raises `ConfigError` where a field that the person set contradicts the checkpoint, and where the tokenizer
    has more tokens than the vocabulary.
    """
    fields = {field.name: getattr(run.model, field.name) for field in dataclasses.fields(AfmoeConfig)}
    if stored is not None:
        for name in run.model.explicit:
            # both older forms of the rotary settings end up in the newer one
            compared = "rope_parameters" if name.startswith("rope_") else name
            if fields[compared] != getattr(stored, compared):
                raise ConfigError(
                    f"model.{name}={fields[name]} contradicts {directory}/config.json, which has "
                    f"{compared}: {getattr(stored, compared)}; take the override away, or train without "
                    "model.pretrained"
                )
        if num_tokens > stored.vocab_size and not run.tokenizer.resize:
            raise ConfigError(
                f"the tokenizer has {num_tokens} tokens, the checkpoint's vocab_size is {stored.vocab_size}; "
                "use the checkpoint's own tokenizer, or tokenizer.resize=true to grow embedding and head"
            )
        return stored
    if "vocab_size" not in run.model.explicit:
        fields["vocab_size"] = num_tokens
    elif fields["vocab_size"] < num_tokens:
        raise ConfigError(
            f"model.vocab_size={fields['vocab_size']} is smaller than the tokenizer, which has "
            f"{num_tokens} tokens; leave it out to follow the tokenizer"
        )
    fields |= {name: value for name, value in special_ids.items() if name not in run.model.explicit}
    return AfmoeConfig(**fields)
