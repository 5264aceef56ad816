"""All experts in one product: `torch.nn.functional.grouped_mm`, which reads the offsets on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.moe.activations import Activation
from afmoe.moe.grouped_mm.saved_rows import SavedRows
from afmoe.moe.grouped_mm.weights import ExpertWeights


def forward_by_grouped_mm(
    x_RD: Tensor, weights: ExpertWeights, offsets_L: Tensor, activation: Activation
) -> tuple[Tensor, list[Tensor]]:
    """y, and the products before the activation [R, F]: gate and up, or up alone."""
    x_RD = x_RD.contiguous()
    products_RF = [_multiply(x_RD, weight, bias, offsets_L) for weight, bias in weights.first]
    hidden_RF = activation.hidden(*products_RF)
    y_RD = _multiply(hidden_RF, weights.down_LDF, weights.down_bias_LD, offsets_L)
    return _zero_padding_rows(y_RD, offsets_L), products_RF


def backward_by_grouped_mm(
    grad_y_RD: Tensor,
    x: SavedRows,
    products_RF: list[Tensor],
    weights: ExpertWeights,
    offsets_L: Tensor,
    activation: Activation,
    needed: list[bool],
) -> list[Tensor | None]:
    """Gradients of x and the six weights, where `needed`."""
    needs_x, needs_gate, needs_up, needs_down, needs_gate_bias, needs_up_bias, needs_down_bias = needed
    grad_y_RD = grad_y_RD.contiguous()
    grad_hidden_RF = F.grouped_mm(grad_y_RD, weights.down_LDF, offs=offsets_L)
    hidden_RF, grad_products = activation.hidden_backward(grad_hidden_RF, *products_RF)
    grad_gate_RF, grad_up_RF = grad_products[0], grad_products[-1]
    grad_x_RD = None
    if needs_x:
        for grad_RF, (weight_LFD, _) in zip(grad_products, weights.first, strict=True):
            part_RD = F.grouped_mm(grad_RF, weight_LFD, offs=offsets_L)
            grad_x_RD = part_RD if grad_x_RD is None else grad_x_RD.add_(part_RD)
        assert grad_x_RD is not None
        _zero_padding_rows(grad_x_RD, offsets_L)
    grad_gate_LFD = grad_up_LFD = None
    # for nothing else x is kept
    if needs_gate or needs_up:
        x_RD = x.all()
        grad_gate_LFD = _weight_gradient(grad_gate_RF, x_RD, offsets_L) if needs_gate else None
        grad_up_LFD = _weight_gradient(grad_up_RF, x_RD, offsets_L) if needs_up else None
    return [
        grad_x_RD,
        grad_gate_LFD,
        grad_up_LFD,
        _weight_gradient(grad_y_RD, hidden_RF, offsets_L) if needs_down else None,
        _bias_gradient(grad_gate_RF, offsets_L) if needs_gate_bias else None,
        _bias_gradient(grad_up_RF, offsets_L) if needs_up_bias else None,
        _bias_gradient(grad_y_RD, offsets_L) if needs_down_bias else None,
    ]


def _multiply(x_RK: Tensor, weight_LNK: Tensor, bias_LN: Tensor | None, offsets_L: Tensor) -> Tensor:
    product_RN = F.grouped_mm(x_RK, weight_LNK.transpose(1, 2), offs=offsets_L)
    if bias_LN is not None:
        rows_R = torch.arange(x_RK.shape[0], device=x_RK.device, dtype=offsets_L.dtype)
        # padding rows get the last expert's: they are zeroed in the end
        expert_R = torch.searchsorted(offsets_L, rows_R, right=True).clamp_(max=bias_LN.shape[0] - 1)
        product_RN += bias_LN[expert_R]
    return product_RN


def _zero_padding_rows(rows_RD: Tensor, offsets_L: Tensor) -> Tensor:
    """Zero the rows that `grouped_mm` leaves unwritten, in place, without reading the offset on the host."""
    is_padding_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) >= offsets_L[-1]
    return rows_RD.masked_fill_(is_padding_R[:, None], 0.0)


def _weight_gradient(grad_RN: Tensor, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
    grad_LNK = F.grouped_mm(grad_RN.t(), x_RK, offs=offsets_L)
    if x_RK.is_cuda and torch.cuda.get_device_capability(x_RK.device)[0] >= 10:
        # pytorch#172439: on sm_100 an empty group's gradient is not written
        is_empty_L = offsets_L.diff(prepend=offsets_L.new_zeros(1)) == 0
        grad_LNK.masked_fill_(is_empty_L[:, None, None], 0.0)
    return grad_LNK


def _bias_gradient(grad_RN: Tensor, offsets_L: Tensor) -> Tensor:
    """The sum over each expert's rows, as a product with ones: in fixed order, and summed in fp32."""
    ones_R1 = grad_RN.new_ones(grad_RN.shape[0], 16 // grad_RN.element_size())
    return _weight_gradient(grad_RN, ones_R1, offsets_L)[:, :, 0].contiguous()
