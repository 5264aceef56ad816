"""Room for more tokens: `tokenizer.resize=true`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from afmoe.errors import ConfigError
from afmoe.model import AfmoeForCausalLM


@torch.no_grad()
def resize_vocabulary(model: AfmoeForCausalLM, num_tokens: int) -> str:
    """Grow embedding and head to `num_tokens` rows; returns a sentence that says what was done.

    Call it before the optimizer is made. Each new row is the mean of the old ones. Drawn at random like a
    fresh model's, a new token's logit would be near 0 while those of a trained model lie far below, so that
    it would take most of the probability from the start; at the mean it gets at most the average token's,
    and the loss on old tokens hardly moves (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    old = model.config.vocab_size
    if num_tokens < old:
        raise ConfigError(f"the vocabulary can only grow: it has {old} tokens, {num_tokens} were asked for")
    embedding, head = model.model.embed_tokens, model.lm_head
    embedding.weight = _grown(embedding.weight, num_tokens)
    embedding.num_embeddings = head.out_features = num_tokens
    head.weight = embedding.weight if model.config.tie_word_embeddings else _grown(head.weight, num_tokens)
    model.config = model.model.config = dataclasses.replace(model.config, vocab_size=num_tokens)
    return f"vocabulary grown from {old} to {num_tokens} tokens; the new rows are the mean of the old ones"


def _grown(weight_VD: Tensor, num_tokens: int) -> nn.Parameter:
    grown_VD = weight_VD.new_empty((num_tokens, weight_VD.shape[1]))
    grown_VD[: len(weight_VD)] = weight_VD
    # fp64: a mean over 200,000 rows
    grown_VD[len(weight_VD) :] = weight_VD.mean(0, dtype=torch.float64).to(weight_VD.dtype)
    return nn.Parameter(grown_VD, requires_grad=weight_VD.requires_grad)
