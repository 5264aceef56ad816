"""The router: a score per expert, of which the best k are chosen and weighted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError, closest


def _softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1)


SCORE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": _softmax,
}
"""What `score_func` may name: fp32 logits_TE -> scores_TE. Other packages add to it."""


class Routing(NamedTuple):
    """What the router decided, all of it in fp32 (fp64 where the model is)."""

    weights_TK: Tensor
    """Factor on each chosen expert's output."""
    expert_ids_TK: Tensor
    """int64, in no order that means anything."""
    logits_TE: Tensor
    scores_TE: Tensor
    """Before selection bias, normalisation and scale."""


class Router(nn.Module):
    """Chooses by score plus selection bias, weighs by score alone: the bias steers load, never outputs.

    Scores, bias, normalisation and scale are fp32. The gate's product is in the dtype of the activations,
    because two logits that bf16 cannot tell apart are what the released weights were trained with; `fp32`
    changes that.
    """

    fp32: bool
    """Take the gate's product with fp32 operands, under autocast as well. Its storage is the weight's own
    dtype, which stays fp32 through casts while this is set."""
    balanced: bool
    """Ignore the scores in the choice: the n-th copy of the batch's real tokens goes to expert n mod E."""
    selection_bias: Tensor

    def __init__(self, config: AfmoeConfig) -> None:
        super().__init__()
        name = config.score_func
        if name not in SCORE_FUNCTIONS:
            raise ConfigError(f"unknown score_func={name}; choose one of: {closest(name, SCORE_FUNCTIONS)}")
        self.score = SCORE_FUNCTIONS[name]
        self.top_k = config.num_experts_per_tok
        self.route_norm = config.route_norm
        self.route_scale = config.route_scale
        self.fp32 = False
        self.balanced = False
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.register_buffer("selection_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, tokens_TD: Tensor, token_mask_T: Tensor | None = None) -> Routing:
        """Route every token; `token_mask_T` (bool, None: all real) only matters to a balanced router."""
        logits_TE = self._logits(tokens_TD)
        scores_TE = self.score(logits_TE)
        if self.balanced:
            expert_ids_TK = self._in_turn(tokens_TD.shape[0], token_mask_T)
        else:
            expert_ids_TK = torch.topk(
                scores_TE.detach() + self.selection_bias, self.top_k, dim=-1, sorted=False
            ).indices
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        if self.route_norm:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if self.route_scale != 1.0:
            weights_TK = weights_TK * self.route_scale
        return Routing(weights_TK, expert_ids_TK, logits_TE, scores_TE)

    def _logits(self, tokens_TD: Tensor) -> Tensor:
        if not self.fp32:
            logits_TE = self.gate(tokens_TD)
            return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        dtype = torch.promote_types(tokens_TD.dtype, torch.float32)
        with torch.autocast(tokens_TD.device.type, enabled=False):
            return F.linear(tokens_TD.to(dtype), self.gate.weight.to(dtype))

    def _in_turn(self, num_tokens: int, token_mask_T: Tensor | None) -> Tensor:
        device = self.gate.weight.device
        if token_mask_T is None:
            ranks_T = torch.arange(num_tokens, device=device)
        else:
            ranks_T = (token_mask_T.cumsum(0) - 1).clamp(min=0)
        copies_TK = ranks_T[:, None] * self.top_k + torch.arange(self.top_k, device=device)
        return copies_TK % self.gate.out_features

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast, as `Module.to`, `.bfloat16()` and the like do, but leave in fp32 what has to stay
        there.

        Updates of a selection bias are of the order 1e-3, which bf16 rounds away from a bias of 0.5.
        """

        def keep_fp32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if tensor.dtype == torch.float32 != moved.dtype else moved

        self.gate._apply(keep_fp32 if self.fp32 else fn, recurse)
        return super()._apply(keep_fp32, recurse=False)
