"""The MLP of many experts on rows sorted by expert, in the dtype handed over, forward and backward.

Two ways, one autograd node. Both save the products before the activation, and x or where it was gathered
from, and compute the activation again in backward: that costs one pass over the rows and saves two tensors of
their size.

- `segments`, on a CPU: `torch.mm` per expert, results and weight gradients written in place. One expert after
  the other, so that its rows stay in the cache between the products.
- `grouped`, on a GPU: `torch.nn.functional.grouped_mm`, which reads the offsets on the device.

Under `torch.compile` the node is the operator `afmoe::expert_mlp`, opaque to the compiler: its graph neither
breaks where the offsets are read nor is made anew when they change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.grouped_mm.node import expert_mlp_node
from afmoe.moe.grouped_mm.saved_rows import RowSource
from afmoe.moe.grouped_mm.segments import Segments
from afmoe.moe.grouped_mm.weights import Biases, ExpertWeights

__all__ = ["Biases", "RowSource", "Segments", "expert_mlp", "expert_mlp_by_grouped_mm", "product_dtype"]


def expert_mlp(
    x_RD: Tensor,
    offsets_L: Tensor,
    gate_LFD: Tensor | None,
    up_LFD: Tensor,
    down_LDF: Tensor,
    activation: Activation,
    biases: Biases | None = None,
    source: RowSource | None = None,
) -> Tensor:
    """activation.hidden(x @ gate.T, x @ up.T) @ down.T per expert. Contract: `afmoe.moe.compute`.

    With a `source`, that is kept for backward, and x is not.
    """
    dtype = product_dtype(x_RD)
    weights = ExpertWeights(gate_LFD, up_LFD, down_LDF, *(biases or ())).to(dtype)
    x_RD = x_RD.to(dtype)
    if x_RD.is_cuda:
        return expert_mlp_by_grouped_mm(x_RD, offsets_L, weights, activation, source)
    return expert_mlp_node(x_RD, weights, offsets_L, activation, source, by_grouped_mm=False)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which `x` enters a product here: the autocast dtype under autocast, else its own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def expert_mlp_by_grouped_mm(
    x_RD: Tensor,
    offsets_L: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    source: RowSource | None = None,
) -> Tensor:
    """`expert_mlp` by `torch.nn.functional.grouped_mm`: bf16, fp16 or fp32, all operands alike.

    In bf16 on GPUs of sm_90 and sm_100 the offsets stay on the device. Elsewhere torch itself reads them on
    the host and loops over the experts (aten/src/ATen/native/cuda/GroupedBlas.cpp, torch 2.10).
    """
    hidden_size, intermediate_size = x_RD.shape[1], weights.up_LFD.shape[1]
    # rows of every operand must start at multiples of 16 bytes; zero columns change no product
    multiple = 16 // x_RD.element_size()
    pad_hidden, pad_intermediate = -hidden_size % multiple, -intermediate_size % multiple
    if pad_hidden or pad_intermediate:
        x_RD = F.pad(x_RD, (0, pad_hidden))
        weights = weights.padded(pad_hidden, pad_intermediate)
        # the padded rows are another tensor than the one that the source gives
        source = None
    y_RD = expert_mlp_node(x_RD, weights, offsets_L, activation, source, by_grouped_mm=True)
    return y_RD[:, :hidden_size] if pad_hidden else y_RD
