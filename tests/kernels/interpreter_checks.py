"""Run in a process of its own with TRITON_INTERPRET=1: the kernels against the written contract.

    TRITON_INTERPRET=1 python interpreter_checks.py GROUP      prints {check: figure} as JSON

Figures are counts of values that differ (`... wrong`), or `||value - contract|| / ||contract||` with the
contract's products in fp64.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "compute"))

import numpy as np
import torch
from expert_cases import COUNTS, Case, build_compute, deviation, make_case, outputs_and_gradients
from interpreter_repair import faults, repair
from kernel_experts import KernelExperts
from torch import Tensor

from afmoe.hardware import Hardware
from afmoe.moe.compute.kernels.contract import (
    FORMATS,
    ProjectionCase,
    num_different,
    products_as_written,
    products_of_kernels,
    stored_copies,
)
from afmoe.moe.compute.kernels.layout import TILE_ROWS, TileLayout
from afmoe.moe.grouped_mm import RowSource

Figures = dict[str, float]
# the first pair: whole blocks; the second: partial ones; the third: rows whose address is no multiple of 16
SIZES = [(256, 128), (200, 136), (33, 30)]


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
        projection = ProjectionCase(case.x_RD, grad_RF, case.gate_LFD, case.up_LFD, case.offsets_L)
        make_products, written = FORMATS[name]
        values = products_of_kernels(make_products(), projection, torch.float32)
        where = f"{counts}, {hidden_size} x {intermediate_size}"
        for product, expected in products_as_written(written, projection).items():
            value = values[product]
            figures[f"{product} {where}"] = deviation(value[: expected.shape[0]], expected)
            if product == "weight gradient":
                empty = [value[expert] for expert, count in enumerate(case.counts) if count == 0]
                figures[f"empty experts {where}, wrong"] = sum(int((v != 0).sum()) for v in empty)
            else:
                figures[f"padding of {product} {where}, wrong"] = int((value[case.num_rows :] != 0).sum())
    return figures


def check_quantizers(name: str) -> Figures:
    """Codes and scales that differ from the contract's, of values of every kind."""
    figures = {}
    for (hidden_size, intermediate_size), dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16)):
        case = make_case(
            COUNTS[0], num_padding_rows=5, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        x_RD, w_LFD = _odd_values(case.x_RD).to(dtype), _odd_values(case.gate_LFD).to(dtype)
        projection = ProjectionCase(x_RD, x_RD, w_LFD, w_LFD, case.offsets_L)
        for copy, (value, expected) in stored_copies(name, projection).items():
            figures[f"{copy} {hidden_size} x {intermediate_size} {dtype}, wrong"] = num_different(
                value, expected
            )
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
    compute = KernelExperts(FORMATS[name][0]())
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
    figures |= _check_without_a_gate(name, case)
    figures |= _check_gathered_again(compute, make_case((40, 0, 24)))
    figures["saved bytes a row, hidden 256, experts 128 wide"] = _saved_bytes_a_row(compute)
    # stored weights are used until the hook says that they changed
    compute(*operands)
    case.down_LDF.data.mul_(2.0)
    figures["stale until told, wrong"] = int((compute(*operands) != together["y_RD"]).sum())
    compute.on_weights_updated()
    figures["fresh when told, wrong"] = int((compute(*operands) != 2.0 * together["y_RD"]).sum())
    return figures


def _check_without_a_gate(name: str, case: Case) -> Figures:
    """hidden = relu2(x @ up.T), against products in fp64 of operands that are not quantized."""
    products = FORMATS[name][0]()
    compute = KernelExperts(products, "relu2")
    leaves = [t.clone().requires_grad_() for t in (case.x_RD, case.up_LFD, case.down_LDF)]
    y_RD = compute(leaves[0], case.offsets_L, None, *leaves[1:])
    actual = (y_RD, *torch.autograd.grad(y_RD, leaves, case.grad_y_RD))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    rows = exact[0][: case.num_rows].split(case.counts)
    hidden = [torch.relu(x @ up.t()).square() for x, up in zip(rows, exact[1], strict=True)]
    y = torch.cat([h @ down.t() for h, down in zip(hidden, exact[2], strict=True)])
    expected = (y, *torch.autograd.grad(y, exact, case.grad_y_RD[: case.num_rows].double()))
    names = ("y", "x", "up", "down")
    return {
        f"without a gate, {key}": deviation(value[: len(wanted)], wanted)
        for key, value, wanted in zip(names, actual, expected, strict=True)
    }


def _saved_bytes_a_row(compute: KernelExperts) -> float:
    """What one layer of a bf16 model keeps for backward, with 512 rows an expert as in Trinity Mini."""
    case = make_case((512, 512), hidden_size=256, intermediate_size=128).to(torch.bfloat16)
    sizes: list[int] = []
    tokens_TD, token_of_row_R = case.x_RD.clone(), torch.arange(case.num_rows)
    weights = (case.gate_LFD, case.up_LFD, case.down_LDF)
    # tokens, their order and the offsets are the dispatcher's, which keeps them anyway
    kept_anyway = {t.data_ptr() for t in (tokens_TD, token_of_row_R, case.offsets_L, *weights)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in kept_anyway:
            sizes.append(tensor.nbytes)
        return tensor

    case.x_RD.requires_grad_()
    case.gate_LFD.requires_grad_()
    source = RowSource(tokens_TD, token_of_row_R)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute(case.x_RD, case.offsets_L, *weights, source=source)
    return sum(sizes) / case.num_rows


def _check_gathered_again(compute: KernelExperts, case: Case) -> Figures:
    """Rows that are gathered again for backward give the same gradients, bit for bit."""
    order_R = torch.randperm(case.x_RD.shape[0])
    tokens_TD = torch.empty_like(case.x_RD).index_copy_(0, order_R, case.x_RD)
    source = RowSource(tokens_TD, order_R)
    given = outputs_and_gradients(compute, case)
    gathered = outputs_and_gradients(partial(compute, source=source), case)
    return {"gathered again, wrong": sum(int((gathered[key] != given[key]).sum()) for key in given)}


def check_compiled(name: str) -> Figures:
    """The operator in a compiled graph: the bits of eager runs, one graph for all counts and layers."""
    figures: Figures = {}
    for dtype, gathered in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        cases = [make_case(c, num_padding_rows=70 - sum(c)).to(dtype) for c in ((40, 0, 24), (0, 0, 0))]
        layers = [KernelExperts(FORMATS[name][0]()) for _ in range(3)]
        torch.compiler.reset()
        # a backend without code generation: needs no C++ compiler
        compiled = torch.compile(KernelExperts.__call__, fullgraph=True, backend="aot_eager")
        for number, (case, layer) in enumerate(zip((*cases, cases[0]), layers, strict=True)):
            source = None
            if gathered:
                order_R = torch.randperm(case.x_RD.shape[0])
                source = RowSource(torch.empty_like(case.x_RD).index_copy_(0, order_R, case.x_RD), order_R)
            expected = outputs_and_gradients(partial(layer, source=source), case)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = outputs_and_gradients(partial(compiled, layer, source=source), case)
            for key, value in found.items():
                figures[f"{key} {number} {dtype} {gathered}, wrong"] = num_different(value, expected[key])
    return figures


def _in_bf16(compute: KernelExperts) -> Callable[..., Tensor]:
    """As the plugin `bf16` calls the kernels."""
    return lambda x_RD, *rest: compute(x_RD.bfloat16(), *rest).to(x_RD.dtype)


def check_gpu_script() -> Figures:
    """`scripts/check_gpu.py` for a GPU of sm_100 that is not there: all but the clock and the waiting."""
    sys.path.append(str(Path(__file__).parent.parent.parent / "scripts"))
    import check_gpu
    import gpu_speed

    def run_once(run: Callable[[], Any]) -> Any:
        run()
        return gpu_speed.Timing(median_ms=1.0, spread=0.0)

    gpu_speed.measure, gpu_speed.NUM_TOKENS = run_once, 64
    hardware = Hardware(device_type="cuda", name="none", capability=(10, 0), has_triton=True)
    device, report = torch.device("cpu"), check_gpu.Report({})
    check_gpu.COUNTS = (130, 0, 1, 69)
    # what goes on is on the other stream
    with contextlib.redirect_stdout(sys.stderr):
        check_gpu.check_plugins(report, hardware, device)
        check_gpu.check_kernels(report, device, check_gpu.formats_for(hardware))
        shapes = [gpu_speed.Shape(f"Mini EP{ranks}", 4, 64, 48, 2, ranks) for ranks in (1, 2)]
        choices = check_gpu.choices_for(hardware)
        speed = gpu_speed.measure_everything(device, hardware, choices, shapes, deadline=float("inf"))
    return {
        "checks": len(report.checks),
        "checks, wrong": sum(not check["right"] for check in report.checks),
        "rows of speed": len(speed.rows),
        "marks": len(speed.marks),
        "left out, wrong": len(speed.left_out) + len(report.left_out),
    }


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
    elif group.startswith("compiled "):
        repair()
        figures["compiled"] = check_compiled(group.removeprefix("compiled "))
    elif group == "check_gpu":
        repair()
        figures["script"] = check_gpu_script()
    else:
        repair()
        figures["products"] = check_products(group)
        figures["layer"] = check_layer(group)
        if group in ("fp8", "fp8-ue8m0", "mxfp8"):
            figures["quantizers"] = check_quantizers(group)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
