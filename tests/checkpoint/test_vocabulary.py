"""Growing the vocabulary."""

from __future__ import annotations

import pytest
import torch

from afmoe.checkpoint.pretrained import load_pretrained, save_pretrained
from afmoe.checkpoint.vocabulary import resize_vocabulary
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError
from afmoe.model import AfmoeForCausalLM


def make_model(**fields):
    config = AfmoeConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        **fields,
    )
    return AfmoeForCausalLM(config)


@torch.no_grad()
def test_old_tokens_keep_their_logits_and_new_ones_get_the_mean(tmp_path):
    model = make_model()
    ids = torch.arange(30)[None]
    before = model(ids).logits
    assert resize_vocabulary(model, 50) == (
        "vocabulary grown from 40 to 50 tokens; the new rows are the mean of the old ones"
    )
    after = model(ids).logits
    assert after.shape[-1] == model.config.vocab_size == 50
    torch.testing.assert_close(after[..., :40], before, rtol=0, atol=1e-6)
    torch.testing.assert_close(after[..., 40:], before.mean(-1, keepdim=True).expand(1, 30, 10))
    embedding = model.model.embed_tokens.weight
    torch.testing.assert_close(embedding[45], embedding[:40].mean(0))

    save_pretrained(model, tmp_path / "model")
    assert load_pretrained(tmp_path / "model").config.vocab_size == 50


def test_tied_weights_stay_tied_and_training_reaches_the_new_rows():
    model = make_model(tie_word_embeddings=True)
    resize_vocabulary(model, 44)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.tensor([[1, 43, 2, 43]])
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad[43].abs().max() > 0


def test_the_vocabulary_never_shrinks():
    with pytest.raises(ConfigError, match="it has 40 tokens, 30 were asked for"):
        resize_vocabulary(make_model(), 30)
