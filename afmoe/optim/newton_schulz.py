"""Orthogonalisation of many matrices at once, by Newton-Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

# Keller Jordan's quintic, https://kellerjordan.github.io/posts/muon: steepest at zero, so that five steps
# bring every singular value near 1 (to 0.7 .. 1.2); torch.optim.Muon has the same
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7


def orthogonalize(stack_NXY: Tensor) -> Tensor:
    """Of each matrix U S V^T nearly U V^T: the same singular vectors, every singular value between about 0.7
    and 1.2.

    `stack_NXY`: N matrices with no more rows than columns, in the dtype to compute in. A zero matrix stays
    zero.
    """
    # the Frobenius norm bounds the largest singular value
    norm_N11 = stack_NXY.flatten(1).norm(dim=1).clamp(min=_EPS)[:, None, None]
    x_NXY = stack_NXY / norm_N11
    for _ in range(_STEPS):
        gram_NXX = x_NXY @ x_NXY.mT
        poly_NXX = torch.baddbmm(gram_NXX, gram_NXX, gram_NXX, beta=_B, alpha=_C)
        x_NXY = torch.baddbmm(x_NXY, poly_NXX, x_NXY, beta=_A)
    return x_NXY
