"""The global norm of gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale all gradients down so that their global norm is at most `limit`, and return the norm before.

    None: the norm alone. It is fp32 whatever the gradients are: torch's own is in their dtype, so with bf16
    gradients it would be known to three digits.
    """
    trained = list(parameters)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        # with an infinite limit the gradients stay as they are
        return nn.utils.clip_grad_norm_(trained, math.inf if limit is None else limit)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if limit is not None:
        nn.utils.clip_grads_with_norm_(trained, limit, norm)
    return norm
