"""Are two sets of tensors the same weights, bit for bit? And what in them is no number?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from afmoe.checkpoint.layouts import is_selection_bias, name_in_layout


def differing_keys(copy: Mapping[str, Tensor], original: Mapping[str, Tensor], layout: str) -> list[str]:
    """Keys under which `copy` does not hold the weights of `original`; both in `layout`.

    Left out of the comparison is what a conversion may add: a selection bias that is all zero, a tensor
    without elements.
    """
    original = {name_in_layout(key, layout): tensor for key, tensor in original.items()}
    wrong = [
        key
        for key, tensor in original.items()
        if tensor.numel() and not (key in copy and same_values(copy[key], tensor))
    ]
    for key, tensor in copy.items():
        is_new_bias = is_selection_bias(key) and not tensor.any()
        if key not in original and tensor.numel() and not is_new_bias:
            wrong.append(key)
    return wrong


def same_values(copy: Tensor, original: Tensor) -> bool:
    """Bitwise, signs of zero and NaNs included.

    A copy in a wider dtype is brought back to the original's first (which loses nothing), for one in a
    narrower dtype the original is rounded as the copy was.
    """
    if copy.shape != original.shape:
        return False
    if torch.promote_types(copy.dtype, original.dtype) == copy.dtype:
        copy = copy.to(original.dtype)
    else:
        original = original.to(copy.dtype)
    return torch.equal(_bits(copy), _bits(original))


def non_finite(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Key to text, `3 NaN, 1 infinite`, for every tensor that holds such values."""
    found = {}
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.isfinite().all():
            continue
        counts = {"NaN": int(tensor.isnan().sum()), "infinite": int(tensor.isinf().sum())}
        found[key] = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return found


def exchanged_keys(
    wrong: list[str], copy: Mapping[str, Tensor], original: Mapping[str, Tensor]
) -> dict[str, str]:
    """For keys of `wrong` whose tensor is found in `original` under another of them: that key."""
    return {
        key: other
        for key in wrong
        for other in wrong
        if key != other and key in copy and other in original and same_values(copy[key], original[other])
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
