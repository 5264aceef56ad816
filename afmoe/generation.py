"""Generation with a cache: one forward over the prompts, then one new token a row and step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afmoe.attention.cache import KeyValueCache
from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import has_cxx_compiler

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


@dataclass(frozen=True, kw_only=True)
class Caching:
    """How keys and values of earlier tokens are kept."""

    kind: str = "growing"
    """`growing` holds what there is; `static` has room for all tokens from the first step on."""
    compile: bool = False
    """Compile the step of one new token, once for many steps and calls. Needs a static cache."""

    def __post_init__(self) -> None:
        if self.kind not in ("growing", "static"):
            raise ConfigError(f"cache must be growing or static, got {self.kind}")
        if self.compile and self.kind != "static":
            raise ConfigError(
                "compile=True needs cache=static: with cache=growing every step has other shapes"
            )


def generate(model: AfmoeForCausalLM, input_ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """Prompts [B, S], padded on the left where `attention_mask` is 0, followed by what the model adds to
    them.

    A row ends with its first stop token and is filled with the pad token from there. Ends when every row
    has, or after `max_new_tokens`. `options`: those of `generate_tokens`.
    """
    new_ids = list(generate_tokens(model, input_ids, max_new_tokens, **options))
    return torch.cat((input_ids, torch.stack(new_ids, dim=1)), dim=1)


@torch.no_grad()
def generate_tokens(
    model: AfmoeForCausalLM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    sampling: Sampling,
    caching: Caching,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> Iterator[Tensor]:
    """The new tokens one step after the other, [B] on the model's device, as `generate` returns them.

    `eos_token_id`: one stop token or several, None: the config's. `pad_token_id` None: the config's, else the
    first stop token. Runs in eval mode and leaves the model in the mode it was in.

    The host waits for the device once a step where there are stop tokens, to know whether all rows have
    ended, and never otherwise.
    """
    stop_ids = _stop_ids(model.config.eos_token_id if eos_token_id is None else eos_token_id)
    if pad_token_id is None:
        pad_token_id = model.config.pad_token_id
    if pad_token_id is None and stop_ids:
        pad_token_id = stop_ids[0]
    attention_mask = _check_prompts(input_ids, attention_mask, max_new_tokens)
    stops = torch.tensor(stop_ids, dtype=input_ids.dtype, device=input_ids.device)
    # the last new token is never fed back
    num_fed = input_ids.shape[1] + max_new_tokens - 1
    cache = model.model.new_cache(num_fed if caching.kind == "static" else None)
    step = _step
    if caching.compile:
        _check_compilable(model)
        step = _compiled_step()
    has_ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    with _eval_mode(model):
        logits_BV = _prefill(model, cache, input_ids, attention_mask)
        for remaining in range(max_new_tokens - 1, -1, -1):
            new_ids = sampling.choose(logits_BV)
            if stop_ids and pad_token_id is not None:
                new_ids = new_ids.masked_fill(has_ended, pad_token_id)
            yield new_ids
            if stop_ids:
                has_ended = has_ended | torch.isin(new_ids, stops)
                if bool(has_ended.all()):
                    return
            if remaining:
                logits_BV = step(model, cache, new_ids[:, None])


def _prefill(
    model: AfmoeForCausalLM, cache: KeyValueCache, input_ids: Tensor, attention_mask: Tensor | None
) -> Tensor:
    output = model.model(input_ids, attention_mask=attention_mask, cache=cache)
    return model.lm_head(output.last_hidden_state[:, -1])


def _step(model: AfmoeForCausalLM, cache: KeyValueCache, ids_B1: Tensor) -> Tensor:
    """Logits [B, V] behind one more token a row."""
    return model.lm_head(model.model(ids_B1, cache=cache).last_hidden_state[:, -1])


@functools.cache
def _compiled_step() -> Callable[[AfmoeForCausalLM, KeyValueCache, Tensor], Tensor]:
    return torch.compile(_step, fullgraph=True)


def _check_compilable(model: AfmoeForCausalLM) -> None:
    if model.model.rotary.depends_on_length:
        raise ConfigError(
            f"compile=True cannot serve rope_type={model.model.rotary.rope_type}, whose frequencies depend "
            "on the longest position; use compile=False"
        )
    device_type = model.lm_head.weight.device.type
    reason = model.model.attention.why_no_static_cache(device_type=device_type, is_compiled=True)
    if reason is not None:
        raise ConfigError(reason)
    if device_type == "cpu" and not has_cxx_compiler():
        raise MachineError(
            "compile=True needs a C++ compiler and Python's headers on a CPU, which were not found; install "
            "them, or use compile=False"
        )


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
