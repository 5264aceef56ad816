"""Generation with a cache: one forward over the prompts, then one new token a row and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afmoe.errors import ConfigError

if TYPE_CHECKING:
    from afmoe.model import AfmoeForCausalLM


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 0.0
    """0 takes the likeliest token; above it, logits are divided by this and a token is drawn."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens whose probabilities sum to at least this."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")

    def choose(self, logits_BV: Tensor) -> Tensor:
        """One token id a row, int64 [B]."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        logits_BV = logits_BV.float() / self.temperature
        if self.top_k is not None:
            kth_B1 = logits_BV.topk(min(self.top_k, logits_BV.shape[-1])).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
        if self.top_p is not None:
            logits_BV = _nucleus(logits_BV, self.top_p)
        return torch.multinomial(logits_BV.softmax(-1), 1).squeeze(-1)


def _nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """-inf outside the smallest set of likeliest tokens with probability `top_p` (arXiv 1904.09751)."""
    sorted_BV, order_BV = logits_BV.sort(descending=True)
    probabilities_BV = sorted_BV.softmax(-1)
    # what lies before a token already suffices; the first token always stays
    is_outside_BV = probabilities_BV.cumsum(-1) - probabilities_BV >= top_p
    return logits_BV.masked_fill(is_outside_BV.scatter(-1, order_BV, is_outside_BV), float("-inf"))


@torch.no_grad()
def generate(
    model: AfmoeForCausalLM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None,
    sampling: Sampling,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
) -> Tensor:
    """Prompts [B, S], padded on the left where `attention_mask` is 0, followed by what the model adds to
    them.

    A row ends with its first stop token (`eos_token_id`, one or several; None: the config's) and is filled
    with `pad_token_id` from there (None: the config's, else the first stop token). Ends when every row has,
    or after `max_new_tokens`. Runs in eval mode and leaves the model in the mode it was in.
    """
    stop_ids = _stop_ids(model.config.eos_token_id if eos_token_id is None else eos_token_id)
    if pad_token_id is None:
        pad_token_id = model.config.pad_token_id
    if pad_token_id is None and stop_ids:
        pad_token_id = stop_ids[0]
    attention_mask = _check_prompts(input_ids, attention_mask, max_new_tokens)
    stops = torch.tensor(stop_ids, dtype=input_ids.dtype, device=input_ids.device)
    cache = model.model.new_cache()
    ids, step_ids = input_ids, input_ids
    has_ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    with _eval_mode(model):
        for _ in range(max_new_tokens):
            output = model.model(step_ids, attention_mask=attention_mask, cache=cache)
            new_ids = sampling.choose(model.lm_head(output.last_hidden_state[:, -1]))
            if pad_token_id is not None:
                new_ids = new_ids.masked_fill(has_ended, pad_token_id)
            step_ids, attention_mask = new_ids[:, None], None
            ids = torch.cat((ids, step_ids), dim=1)
            if stop_ids:
                has_ended = has_ended | torch.isin(new_ids, stops)
                if bool(has_ended.all()):
                    break
    return ids


def _stop_ids(eos_token_id: int | list[int] | None) -> list[int]:
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [int(token) for token in eos_token_id]


def _check_prompts(input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> Tensor | None:
    """The mask, or None when nothing is padded."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ConfigError(
            f"input_ids must be [batch, sequence] with at least one token, got {list(input_ids.shape)}"
        )
    if attention_mask is None:
        return None
    is_real = attention_mask.to(torch.bool)
    if is_real.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask must be of input_ids' shape {list(input_ids.shape)}, got {list(is_real.shape)}"
        )
    if bool((is_real[:, :-1] & ~is_real[:, 1:]).any()) or not bool(is_real[:, -1].all()):
        raise ConfigError(
            "prompts must be padded on the left: attention_mask has a 0 behind a 1, or a row without any 1"
        )
    return None if bool(is_real.all()) else attention_mask


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
