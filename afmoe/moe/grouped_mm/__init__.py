"""The MLP of many experts on rows sorted by expert, in the dtype handed over, forward and backward.

Two ways, without autograd. Both save the products before the activation, and x or where it was gathered from,
and compute the activation again in backward: that costs one pass over the rows and saves two tensors of their
size.

- `segments`, on a CPU: `torch.mm` per expert, results and weight gradients written in place. One expert after
  the other, so that its rows stay in the cache between the products.
- `grouped`, on a GPU: `torch.nn.functional.grouped_mm`, which reads the offsets on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afmoe.moe.grouped_mm.grouped import backward_by_grouped_mm, forward_by_grouped_mm
from afmoe.moe.grouped_mm.saved_rows import RowSource, SavedRows
from afmoe.moe.grouped_mm.segments import Segments, backward_by_segments, forward_by_segments
from afmoe.moe.grouped_mm.weights import Biases, ExpertWeights

__all__ = [
    "Biases",
    "ExpertWeights",
    "RowSource",
    "SavedRows",
    "Segments",
    "backward_by_grouped_mm",
    "backward_by_segments",
    "forward_by_grouped_mm",
    "forward_by_segments",
    "product_dtype",
]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which `x` enters a product here: the autocast dtype under autocast, else its own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
