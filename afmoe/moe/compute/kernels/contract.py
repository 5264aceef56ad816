"""What each format's stored operands and products have to be: `afmoe.moe.quantization` beside the kernels.

For tests in triton's interpreter and for `scripts/check_gpu.py`. Plain torch, products in fp64, host offsets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afmoe.moe import quantization as contract
from afmoe.moe.compute.kernels.bf16 import Bf16Products
from afmoe.moe.compute.kernels.fp8 import Fp8Products
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.mxfp8 import Mxfp8Products
from afmoe.moe.compute.kernels.products import Products
from afmoe.moe.quantization import MX_BLOCK_SIZE


@dataclass(frozen=True)
class ProjectionCase:
    """Operands of the products of one projection [N, K]; `second_w_LNK` is a weight of the same shape."""

    x_RK: Tensor
    grad_RN: Tensor
    w_LNK: Tensor
    second_w_LNK: Tensor
    offsets_L: Tensor

    @property
    def num_rows(self) -> int:
        """Rows that belong to an expert."""
        return int(self.offsets_L[-1])

    @property
    def experts(self) -> list[slice]:
        borders = [0, *self.offsets_L.tolist()]
        return [slice(start, end) for start, end in itertools.pairwise(borders)]


class Written(Protocol):
    """What the operands of each product stand for, in fp64."""

    def rows(self, x_RK: Tensor) -> Tensor: ...

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor: ...

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        """`dim`: the one that the product sums over."""
        ...


class Exact:
    """Nothing is rounded."""

    def rows(self, x_RK: Tensor) -> Tensor:
        return x_RK.double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        return x_RK.double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        return w_LNK.double()


class WrittenBf16:
    def rows(self, x_RK: Tensor) -> Tensor:
        return x_RK.bfloat16().double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        return x_RK.bfloat16().double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        return w_LNK.bfloat16().double()


@dataclass(frozen=True)
class WrittenFp8:
    scales: str
    wgrad: str = "fp8"

    def rows(self, x_RK: Tensor) -> Tensor:
        return contract.dequantize_rows(*contract.quantize_rows(x_RK, self.scales)).double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        if self.wgrad == "bf16":
            return x_RK.bfloat16().double()
        quantized = contract.quantize_columns(x_RK, offsets_L, self.scales)
        return contract.dequantize_columns(*quantized, offsets_L).double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        return contract.dequantize_weights(*contract.quantize_weights(w_LNK, self.scales)).double()


class WrittenMxfp8:
    def rows(self, x_RK: Tensor) -> Tensor:
        quantized = contract.quantize_rows(x_RK, "ue8m0", MX_BLOCK_SIZE)
        return contract.dequantize_rows(*quantized, MX_BLOCK_SIZE).double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        quantized = contract.quantize_columns(x_RK, offsets_L, "ue8m0", MX_BLOCK_SIZE)
        return contract.dequantize_columns(*quantized, offsets_L, MX_BLOCK_SIZE).double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        return contract.dequantize_mx_weights(*contract.quantize_mx_weights(w_LNK, dim), dim).double()


FORMATS: dict[str, tuple[Callable[[], Products], Written]] = {
    "bf16": (Bf16Products, WrittenBf16()),
    "fp8": (lambda: Fp8Products("fp32", "fp8"), WrittenFp8("fp32")),
    "fp8-ue8m0": (lambda: Fp8Products("ue8m0", "fp8"), WrittenFp8("ue8m0")),
    "fp8-wgrad-bf16": (lambda: Fp8Products("fp32", "bf16"), WrittenFp8("fp32", "bf16")),
    "mxfp8": (Mxfp8Products, WrittenMxfp8()),
}
"""The kernels of each format, and what they have to compute."""


def products_of_kernels(products: Products, case: ProjectionCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Forward, input gradient through one and through two weights, weight gradient; results in `dtype`."""
    layout = TileLayout.of(case.offsets_L, case.x_RK.shape[0])
    x_rows, x_columns = products.store(case.x_RK, layout, rows=True, columns=True)
    grad_rows, grad_columns = products.store(case.grad_RN, layout, rows=True, columns=True)
    first, second = (products.store_weight(w, transposed=True) for w in (case.w_LNK, case.second_w_LNK))

    def out_like(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, dtype=dtype)

    one, two = [(grad_rows, first.transposed)], (grad_rows, second.transposed)
    return {
        "forward": products.multiply([(x_rows, first.forward)], layout, out_like(case.grad_RN)),
        "input gradient": products.multiply(one, layout, out_like(case.x_RK)),
        "input gradient of two weights": products.multiply([*one, two], layout, out_like(case.x_RK)),
        "weight gradient": products.weight_gradient(grad_columns, x_columns, layout, out_like(case.w_LNK)),
    }


def products_as_written(written: Written, case: ProjectionCase) -> dict[str, Tensor]:
    """The same in fp64, of the operands as they are written down; rows of the experts only."""
    x_RK, grad_RN = case.x_RK[: case.num_rows], case.grad_RN[: case.num_rows]
    x, grad, w = written.rows(x_RK), written.rows(grad_RN), written.weight(case.w_LNK, 2)
    input_grads = []
    for weight in (case.w_LNK, case.second_w_LNK):
        for_backward = written.weight(weight, 1)
        input_grads.append(torch.cat([grad[rows] @ for_backward[e] for e, rows in enumerate(case.experts)]))
    x_columns, grad_columns = written.columns(x_RK, case.offsets_L), written.columns(grad_RN, case.offsets_L)
    return {
        "forward": torch.cat([x[rows] @ w[e].t() for e, rows in enumerate(case.experts)]),
        "input gradient": input_grads[0],
        "input gradient of two weights": input_grads[0] + input_grads[1],
        "weight gradient": torch.stack([grad_columns[rows].t() @ x_columns[rows] for rows in case.experts]),
    }


def stored_copies(name: str, case: ProjectionCase) -> dict[str, tuple[Tensor, Tensor]]:
    """(stored, written) of codes and scales of each copy in fp8 or mxfp8, cut to what is written down."""
    x_RK, w_LNK, num_rows = case.x_RK, case.w_LNK, case.num_rows
    size_n, size_k = w_LNK.shape[1:]
    counts = [rows.stop - rows.start for rows in case.experts]
    block = MX_BLOCK_SIZE if name == "mxfp8" else contract.BLOCK_SIZE
    scales = "fp32" if name == "fp8" else "ue8m0"
    products = FORMATS[name][0]()
    layout = TileLayout.of(case.offsets_L, x_RK.shape[0])
    (codes, row_scales), (column_codes, column_scales) = products.store(x_RK, layout, rows=True, columns=True)
    weight = products.store_weight(w_LNK, transposed=True)
    row_codes, expected_row_scales = contract.quantize_rows(x_RK[:num_rows], scales, block)
    expected_columns, expected_column_scales = contract.quantize_columns(x_RK, case.offsets_L, scales, block)
    # the slots of each expert's rows in the padded columns
    firsts = layout.first_tile_of_expert.tolist()
    slots = torch.cat(
        [torch.arange(count) + TILE_ROWS * first for first, count in zip(firsts, counts, strict=False)]
    )
    blocks = torch.cat(
        [
            torch.arange(-(-count // block)) + TILE_ROWS // block * first
            for first, count in zip(firsts, counts, strict=False)
        ]
    )
    if name == "mxfp8":
        forward = contract.quantize_mx_weights(w_LNK, 2)
        backward = [t.transpose(1, 2) for t in contract.quantize_mx_weights(w_LNK, 1)]
        row_scales, column_scales, *weight_scales = (
            _power_of_two(t)
            for t in (row_scales[:num_rows], column_scales.t(), weight.forward[1], weight.transposed[1])
        )
        row_blocks = row_scales[:, : expected_row_scales.shape[1]]
        # e8m0 has no infinity: a block that holds one has the scale NaN
        expected_row_scales, expected_column_scales, *weight_expected = (
            torch.where(t.isinf(), float("nan"), t)
            for t in (expected_row_scales, expected_column_scales, forward[1], backward[1])
        )
    else:
        forward = contract.quantize_weights(w_LNK, scales)
        backward = [t.transpose(1, 2) for t in forward]
        row_blocks = row_scales[: expected_row_scales.shape[1], :num_rows].t()
        weight_scales = [weight.forward[1], weight.transposed[1]]
        weight_expected = [forward[1], backward[1]]
    shapes = [expected.shape for expected in weight_expected]
    return {
        "row codes": (codes[:num_rows, :size_k], row_codes),
        # codes behind the last value are zero, or NaN as their whole block is
        "row padding": (
            codes[:num_rows, size_k:],
            torch.where(row_blocks[:, -1:].isnan(), float("nan"), 0.0).expand(-1, codes.shape[1] - size_k),
        ),
        "row scales": (row_blocks, expected_row_scales),
        "column codes": (
            column_codes.view(torch.uint8)[:size_k].t()[slots].view(torch.float8_e4m3fn),
            expected_columns,
        ),
        "column scales": (column_scales[blocks][:, :size_k], expected_column_scales),
        "weight codes": (weight.forward[0][:, :size_n, :size_k], forward[0]),
        "transposed weight codes": (weight.transposed[0][:, :size_k, :size_n], backward[0]),
        "weight scales": (weight_scales[0][:, : shapes[0][1], : shapes[0][2]], weight_expected[0]),
        "transposed weight scales": (
            weight_scales[1][:, : shapes[1][1], : shapes[1][2]],
            weight_expected[1],
        ),
    }


def num_different(stored: Tensor, written: Tensor) -> int:
    """Values that differ; NaN counts as equal to NaN, because its sign and payload carry nothing."""
    stored, written = stored.float(), written.float()
    return int(((stored != written) & ~(stored.isnan() & written.isnan())).sum())


def _power_of_two(exponents: Tensor) -> Tensor:
    return exponents.view(torch.float8_e8m0fnu).float()
