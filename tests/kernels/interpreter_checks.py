"""Run in a process of its own with TRITON_INTERPRET=1: the kernels against the written contract.

    TRITON_INTERPRET=1 python interpreter_checks.py GROUP      prints {check: figure} as JSON

Figures are counts of values that differ (`... wrong`), or `||value - contract|| / ||contract||` with the
contract's products in fp64.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "compute"))

import numpy as np
import torch
from expert_cases import COUNTS, Case, build_compute, deviation, make_case, outputs_and_gradients
from interpreter_repair import faults, repair
from torch import Tensor

from afmoe.moe import quantization as contract
from afmoe.moe.activations import activation_named
from afmoe.moe.compute.kernels.autograd import KernelExperts
from afmoe.moe.compute.kernels.bf16 import Bf16Products
from afmoe.moe.compute.kernels.fp8 import Fp8Products
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.compute.kernels.mxfp8 import Mxfp8Products

Figures = dict[str, float]
# the first pair: whole blocks; the second: partial ones; the third: rows whose address is no multiple of 16
SIZES = [(256, 128), (200, 136), (33, 30)]


class Bf16Contract:
    """What the operands of each product stand for, in fp64."""

    products = Bf16Products()

    def rows(self, x_RK: Tensor) -> Tensor:
        return x_RK.bfloat16().double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        return x_RK.bfloat16().double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        return w_LNK.bfloat16().double()


class Fp8Contract:
    def __init__(self, scales: str, wgrad: str = "fp8") -> None:
        self.scales, self.wgrad = scales, wgrad
        self.products = Fp8Products(scales, wgrad)

    def rows(self, x_RK: Tensor) -> Tensor:
        return contract.dequantize_rows(*contract.quantize_rows(x_RK, self.scales)).double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        if self.wgrad == "bf16":
            return x_RK.bfloat16().double()
        quantized = contract.quantize_columns(x_RK, offsets_L, self.scales)
        return contract.dequantize_columns(*quantized, offsets_L).double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        return contract.dequantize_weights(*contract.quantize_weights(w_LNK, self.scales)).double()


class Mxfp8Contract:
    products = Mxfp8Products()

    def rows(self, x_RK: Tensor) -> Tensor:
        return contract.dequantize_rows(*contract.quantize_rows(x_RK, "ue8m0", 32), 32).double()

    def columns(self, x_RK: Tensor, offsets_L: Tensor) -> Tensor:
        quantized = contract.quantize_columns(x_RK, offsets_L, "ue8m0", 32)
        return contract.dequantize_columns(*quantized, offsets_L, 32).double()

    def weight(self, w_LNK: Tensor, dim: int) -> Tensor:
        quantized = contract.quantize_mx_weights(w_LNK, dim)
        return contract.dequantize_mx_weights(*quantized, dim).double()


CONTRACTS: dict[str, Callable[[], Any]] = {
    "bf16": Bf16Contract,
    "fp8": lambda: Fp8Contract("fp32"),
    "fp8-ue8m0": lambda: Fp8Contract("ue8m0"),
    "fp8-wgrad-bf16": lambda: Fp8Contract("fp32", "bf16"),
    "mxfp8": Mxfp8Contract,
}


def check_layout() -> Figures:
    """Tiles that are not what a loop over the experts gives, for offsets of every kind."""
    figures = {}
    many = tuple((7 * e) % 300 for e in range(130))
    for counts, num_padding_rows in itertools.product([*COUNTS, many], (0, 1, 300)):
        offsets_L = torch.tensor(counts).cumsum(0).to(torch.int32)
        num_rows = sum(counts) + num_padding_rows
        layout = TileLayout.of(offsets_L, num_rows)
        expected, first_tiles, start = [], [], 0
        for expert, count in enumerate((*counts, num_padding_rows)):
            first_tiles.append(len(expected))
            expected += [(expert, row, start + count) for row in range(start, start + count, TILE_ROWS)]
            start += count
        tiles = list(
            zip(
                layout.expert_of_tile.tolist(),
                layout.first_row_of_tile.tolist(),
                layout.end_row_of_tile.tolist(),
                strict=True,
            )
        )
        used = tiles[: len(expected)]
        wrong = sum(a != b for a, b in zip(used, expected, strict=True))
        wrong += sum(expert != -1 for expert, _, _ in tiles[len(expected) :])
        wrong += layout.first_tile_of_expert.tolist() != first_tiles
        figures[f"{len(counts)} experts, {num_rows} rows, wrong"] = wrong
    return figures


def check_products(name: str) -> Figures:
    """Forward, input gradient of two weights, and weight gradient, with results in fp32."""
    figures = {}
    for counts, (hidden_size, intermediate_size) in itertools.product(COUNTS[:2], SIZES):
        case = make_case(
            counts, num_padding_rows=130, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        # rows of very different size, and padding rows that must reach nothing
        case.x_RD *= torch.exp2(torch.randint(-6, 6, (case.x_RD.shape[0], 1)))
        grad_RF = torch.randn(case.x_RD.shape[0], intermediate_size)
        case.x_RD[case.num_rows :] = grad_RF[case.num_rows :] = float("nan")
        results = _products(CONTRACTS[name](), case, grad_RF)
        where = f"{counts}, {hidden_size} x {intermediate_size}"
        for product, (value, expected) in results.items():
            figures[f"{product} {where}"] = deviation(value[: expected.shape[0]], expected)
            if product == "weight gradient":
                empty = [value[expert] for expert, count in enumerate(case.counts) if count == 0]
                figures[f"empty experts {where}, wrong"] = sum(int((v != 0).sum()) for v in empty)
            else:
                figures[f"padding of {product} {where}, wrong"] = int((value[case.num_rows :] != 0).sum())
    return figures


def _products(written: Any, case: Case, grad_RF: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(value, contract) of each product of a projection."""
    products, num_rows = written.products, case.num_rows
    layout = TileLayout.of(case.offsets_L, case.x_RD.shape[0])
    x_rows, x_columns = products.store(case.x_RD, layout, rows=True, columns=True)
    grad_rows, grad_columns = products.store(grad_RF, layout, rows=True, columns=True)
    gate = products.store_weight(case.gate_LFD, transposed=True)
    up = products.store_weight(case.up_LFD, transposed=True)
    borders = [0, *case.offsets_L.tolist()]
    experts = [slice(start, end) for start, end in itertools.pairwise(borders)]
    x_RD, grad = written.rows(case.x_RD[:num_rows]), written.rows(grad_RF[:num_rows])
    gate_LFD = written.weight(case.gate_LFD, 2)
    backward = [written.weight(weight, 1) for weight in (case.gate_LFD, case.up_LFD)]
    x_col = written.columns(case.x_RD[:num_rows], case.offsets_L)
    grad_col = written.columns(grad_RF[:num_rows], case.offsets_L)
    input_grads = [torch.cat([grad[rows] @ w[e] for e, rows in enumerate(experts)]) for w in backward]
    return {
        "forward": (
            products.multiply([(x_rows, gate.forward)], layout, torch.empty_like(grad_RF)),
            torch.cat([x_RD[rows] @ gate_LFD[e].t() for e, rows in enumerate(experts)]),
        ),
        "input gradient": (
            products.multiply([(grad_rows, gate.transposed)], layout, torch.empty_like(case.x_RD)),
            input_grads[0],
        ),
        "input gradient of two weights": (
            products.multiply(
                [(grad_rows, gate.transposed), (grad_rows, up.transposed)],
                layout,
                torch.empty_like(case.x_RD),
            ),
            input_grads[0] + input_grads[1],
        ),
        "weight gradient": (
            products.weight_gradient(grad_columns, x_columns, layout, torch.empty_like(case.gate_LFD)),
            torch.stack([grad_col[rows].t() @ x_col[rows] for rows in experts]),
        ),
    }


def check_quantizers(name: str) -> Figures:
    """Codes and scales that differ from the contract's, of values of every kind."""
    figures = {}
    for (hidden_size, intermediate_size), dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16)):
        case = make_case(
            COUNTS[0], num_padding_rows=5, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        x_RD, w_LFD = _odd_values(case.x_RD).to(dtype), _odd_values(case.gate_LFD).to(dtype)
        for copy, (value, expected) in _copies(name, x_RD, w_LFD, case).items():
            # NaN counts as equal to NaN: its sign and payload carry nothing
            same = (value.float() == expected.float()) | (value.isnan() & expected.isnan())
            figures[f"{copy} {hidden_size} x {intermediate_size} {dtype}, wrong"] = int((~same).sum())
    return figures


def _odd_values(x: Tensor) -> Tensor:
    """Magnitudes from 2^-60 to 2^60, rows of zeros and of subnormals, infinity and NaN."""
    x = x * torch.exp2(torch.randint(-60, 60, (*x.shape[:-1], 1)))
    x[..., 3, :] = 0.0
    x[..., 4, :] *= 1e-40
    x[..., 5, 1] = float("inf")
    x[..., 6, 2] = float("nan")
    # ties: halves between codes where the block's largest value makes the scale one
    x[..., 7, :] = torch.arange(x.shape[-1]) / 8 % 32
    x[..., 7, 0] = 448.0
    return x


def _copies(name: str, x_RK: Tensor, w_LNK: Tensor, case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """(value, contract) of each stored copy, cut to what the contract describes."""
    num_rows, (size_n, size_k) = case.num_rows, w_LNK.shape[1:]
    block = 32 if name == "mxfp8" else 128
    scales = "fp32" if name == "fp8" else "ue8m0"
    products = CONTRACTS[name]().products
    layout = TileLayout.of(case.offsets_L, x_RK.shape[0])
    (codes, row_scales), (column_codes, column_scales) = products.store(x_RK, layout, rows=True, columns=True)
    weight = products.store_weight(w_LNK, transposed=True)
    row_codes, expected_row_scales = contract.quantize_rows(x_RK[:num_rows], scales, block)
    expected_columns, expected_column_scales = contract.quantize_columns(x_RK, case.offsets_L, scales, block)
    # the slots of each expert's rows in the padded columns
    firsts = layout.first_tile_of_expert.tolist()
    slots = torch.cat(
        [torch.arange(count) + TILE_ROWS * first for first, count in zip(firsts, case.counts, strict=False)]
    )
    blocks = torch.cat(
        [
            torch.arange(-(-count // block)) + TILE_ROWS // block * first
            for first, count in zip(firsts, case.counts, strict=False)
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
        "column codes": (column_codes[:size_k].t()[slots], expected_columns),
        "column scales": (column_scales[blocks][:, :size_k], expected_column_scales),
        "weight codes": (weight.forward[0][:, :size_n, :size_k], forward[0]),
        "transposed weight codes": (weight.transposed[0][:, :size_k, :size_n], backward[0]),
        "weight scales": (weight_scales[0][:, : shapes[0][1], : shapes[0][2]], weight_expected[0]),
        "transposed weight scales": (
            weight_scales[1][:, : shapes[1][1], : shapes[1][2]],
            weight_expected[1],
        ),
    }


def _power_of_two(exponents: Tensor) -> Tensor:
    return exponents.view(torch.float8_e8m0fnu).float()


def check_layer(name: str) -> Figures:
    """The whole gated MLP: against the plugin that a CPU runs, and the contract of `afmoe.moe.compute`."""
    choice: Any = {
        "bf16": "bf16",
        "fp8": "fp8",
        "fp8-ue8m0": {"name": "fp8", "scales": "ue8m0"},
        "fp8-wgrad-bf16": {"name": "fp8", "wgrad": "bf16"},
        "mxfp8": "mxfp8",
    }[name]
    figures: Figures = {}
    compute = KernelExperts(CONTRACTS[name]().products, activation_named("silu"))
    for counts, dtype in (
        (COUNTS[0], torch.float32),
        (COUNTS[0], torch.bfloat16),
        (COUNTS[3], torch.float32),
    ):
        case = make_case(counts, num_padding_rows=5).to(dtype)
        case.x_RD[case.num_rows :] = case.grad_y_RD[case.num_rows :] = float("nan")
        actual = outputs_and_gradients(_in_bf16(compute) if name == "bf16" else compute, case)
        expected = outputs_and_gradients(build_compute(choice, case), case)
        for key, value in actual.items():
            figures[f"{key} {counts} {dtype}"] = deviation(value, expected[key])
            figures[f"dtype of {key} {counts} {dtype}, wrong"] = float(value.dtype != dtype)
    # one operand trained alone; gradients expanded; no gradients at all; no row at all
    case = make_case((40, 0, 24), num_padding_rows=2)
    together = outputs_and_gradients(compute, case)
    for key in ("x_RD", "gate_LFD", "up_LFD", "down_LDF"):
        leaf = getattr(case, key).clone().requires_grad_()
        alone = replace(case, **{key: leaf})
        y_RD = compute(alone.x_RD, alone.offsets_L, alone.gate_LFD, alone.up_LFD, alone.down_LDF)
        (grad,) = torch.autograd.grad(y_RD, [leaf], case.grad_y_RD)
        figures[f"{key} trained alone, wrong"] = int((grad != together[key]).sum())
    expanded = replace(case, grad_y_RD=case.grad_y_RD[:1, :1].expand_as(case.x_RD))
    contiguous = replace(case, grad_y_RD=expanded.grad_y_RD.contiguous())
    pairs = [outputs_and_gradients(compute, one) for one in (expanded, contiguous)]
    figures["expanded gradient, wrong"] = sum(int((pairs[0][k] != pairs[1][k]).sum()) for k in pairs[0])
    operands = (case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)
    with torch.no_grad():
        figures["without gradients, wrong"] = int((compute(*operands) != together["y_RD"]).sum())
    nothing = outputs_and_gradients(compute, make_case((0, 0)))
    figures["no row at all, wrong"] = sum(int((value != 0).sum()) for value in nothing.values())
    # stored weights are used until the hook says that they changed
    compute(*operands)
    case.down_LDF.data.mul_(2.0)
    figures["stale until told, wrong"] = int((compute(*operands) != together["y_RD"]).sum())
    compute.on_weights_updated()
    figures["fresh when told, wrong"] = int((compute(*operands) != 2.0 * together["y_RD"]).sum())
    return figures


def _in_bf16(compute: KernelExperts) -> Callable[..., Tensor]:
    """As the plugin `bf16` calls the kernels."""
    return lambda x_RD, *rest: compute(x_RD.bfloat16(), *rest).to(x_RD.dtype)


def main(group: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # infinity and NaN are among the values on purpose
    np.seterr(all="ignore")
    figures: dict[str, Figures] = {}
    if group == "interpreter":
        figures["unrepaired"] = faults()
        repair()
        figures["repaired"] = faults()
        figures["layout"] = check_layout()
    else:
        repair()
        figures["products"] = check_products(group)
        figures["layer"] = check_layer(group)
        if group in ("fp8", "fp8-ue8m0", "mxfp8"):
            figures["quantizers"] = check_quantizers(group)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
