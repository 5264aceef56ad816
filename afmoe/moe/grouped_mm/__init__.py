"""The MLP of many experts on rows sorted by expert, in the dtype handed over, forward and backward.

Two ways, without autograd. Both save the products before the activation, and x or where it was gathered from,
and compute the activation again in backward: that costs one pass over the rows and saves two tensors of their
size.

- `by_segments`, on a CPU: some neighbouring experts after the other, so that their rows stay in the cache
  between the products, which are written in place: by compiled kernels, or by `torch.mm` per expert.
- `grouped`, on a GPU: `torch.nn.functional.grouped_mm`, which reads the offsets on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afmoe.moe.grouped_mm.by_segments import backward_by_segments, forward_by_segments
from afmoe.moe.grouped_mm.grouped import backward_by_grouped_mm, forward_by_grouped_mm
from afmoe.moe.grouped_mm.products import CompiledProducts, RunProducts, TorchProducts
from afmoe.moe.grouped_mm.saved_rows import RowSource, SavedRows
from afmoe.moe.grouped_mm.segments import ExpertRun, Segments
from afmoe.moe.grouped_mm.weights import Biases, ExpertWeights

__all__ = [
    "Biases",
    "CompiledProducts",
    "ExpertRun",
    "ExpertWeights",
    "RowSource",
    "RunProducts",
    "SavedRows",
    "Segments",
    "TorchProducts",
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
