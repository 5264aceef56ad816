"""Every compute plugin keeps the contract of `afmoe.moe.compute`, judged against `reference` in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import COUNTS, Case, build_compute, deviation, make_case, outputs_and_gradients

from afmoe.moe.activations import activation_named
from afmoe.moe.compute.grouped import GroupedExperts
from afmoe.moe.grouped_mm import ExpertWeights, RowSource

# measured over sizes (64, 48), (30, 33), (256, 128), (200, 136) and COUNTS; the bound is three times that:
# fp64 5.7e-16, fp32 4.6e-7, bf16 7.0e-3 (inputs rounded to bf16 as well)
FP64, FP32, BF16 = 2e-15, 1.4e-6, 2.1e-2
# three products in a row, each with 3.7e-2 of rounding error; measured 3.9e-2 to 1.3e-1. What this catches is
# a path that is wrong or not quantized at all; test_quantized.py holds the numbers to the contract
FP8 = 2e-1

PLUGINS = [
    ("reference", torch.float32, FP32),
    ("native", torch.float64, FP64),
    ("native", torch.float32, FP32),
    ("native by torch", torch.float32, FP32),
    ("native", torch.bfloat16, BF16),
    ("grouped_mm", torch.float32, FP32),
    ("grouped_mm", torch.bfloat16, BF16),
    ("bf16", torch.float32, BF16),
    ("bf16", torch.bfloat16, BF16),
    ("fp8", torch.float32, FP8),
    ("fp8", torch.bfloat16, FP8),
    ("fp8 by torch", torch.float32, FP8),
    ("mxfp8", torch.float32, FP8),
    ("mxfp8", torch.bfloat16, FP8),
    ("mxfp8 by torch", torch.bfloat16, FP8),
]
each_plugin = pytest.mark.parametrize(("name", "dtype", "tolerance"), PLUGINS)


def compute_named(name: str, case: Case, activation: str = "silu") -> Any:
    if name != "grouped_mm":
        return build_compute(name, case, activation)

    # what `native` runs on a GPU; torch has it on a CPU as well
    experts = GroupedExperts(activation_named(activation))

    def compute(x_RD: torch.Tensor, offsets_L: torch.Tensor, *weights: Any) -> torch.Tensor:
        *projections, biases = weights if len(weights) == 4 else (*weights, ())
        return experts.by_grouped_mm(x_RD, offsets_L, ExpertWeights(*projections, *biases))

    return compute


@each_plugin
# the second pair of sizes: rows whose address is no multiple of 16 bytes
@pytest.mark.parametrize(
    ("counts", "sizes"), [*((counts, (64, 48)) for counts in COUNTS), (COUNTS[0], (30, 33))], ids=str
)
def test_outputs_and_gradients_equal_the_reference(
    name: str, dtype: torch.dtype, tolerance: float, counts: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    case = make_case(counts, num_padding_rows=7, hidden_size=sizes[0], intermediate_size=sizes[1]).to(dtype)
    expected = outputs_and_gradients(build_compute("reference", case), case.to(torch.float64))
    actual = outputs_and_gradients(compute_named(name, case), case)
    for key, value in actual.items():
        assert value.dtype == dtype, key
        assert value.shape == expected[key].shape, key
        assert deviation(value, expected[key]) <= tolerance, key


@each_plugin
def test_empty_experts_and_padding_rows_get_exactly_zero(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    case = make_case(COUNTS[0], num_padding_rows=5).to(dtype)
    # whatever lies in the padding rows must reach nothing
    case.x_RD[case.num_rows :] = float("nan")
    case.grad_y_RD[case.num_rows :] = float("nan")
    actual = outputs_and_gradients(compute_named(name, case), case)
    assert all(value.isfinite().all() for value in actual.values())
    for key in ("y_RD", "x_RD"):
        assert (actual[key][case.num_rows :] == 0).all(), key
    for key in ("gate_LFD", "up_LFD", "down_LDF"):
        for expert, count in enumerate(case.counts):
            assert (actual[key][expert] == 0).all() == (count == 0), (key, expert)


@each_plugin
@pytest.mark.parametrize("num_padding_rows", [0, 3])
def test_a_layer_without_any_routed_row_works(
    name: str, dtype: torch.dtype, tolerance: float, num_padding_rows: int
) -> None:
    case = make_case((0, 0, 0), num_padding_rows=num_padding_rows).to(dtype)
    actual = outputs_and_gradients(compute_named(name, case), case)
    assert actual["y_RD"].shape == (num_padding_rows, 64)
    assert all((value == 0).all() for value in actual.values())


@each_plugin
def test_gradients_may_arrive_expanded_or_non_contiguous(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    case = make_case((40, 0, 24)).to(dtype)
    compute = compute_named(name, case)
    for grad in (case.grad_y_RD[:1, :1].expand_as(case.x_RD), case.grad_y_RD.t().contiguous().t()):
        strided = outputs_and_gradients(compute, replace(case, grad_y_RD=grad))
        contiguous = outputs_and_gradients(compute, replace(case, grad_y_RD=grad.contiguous()))
        assert all(torch.equal(strided[key], contiguous[key]) for key in strided)


@each_plugin
@pytest.mark.parametrize("trained", ["x_RD", "gate_LFD", "up_LFD", "down_LDF"])
def test_the_gradient_of_one_operand_alone_equals_the_one_among_all(
    name: str, dtype: torch.dtype, tolerance: float, trained: str
) -> None:
    case = make_case((40, 0, 24), num_padding_rows=2).to(dtype)
    compute = compute_named(name, case)
    expected = outputs_and_gradients(compute, case)[trained]
    getattr(case, trained).requires_grad_()
    y_RD = compute(case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)
    (actual,) = torch.autograd.grad(y_RD, [getattr(case, trained)], case.grad_y_RD)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["native", "native by torch", "fp8", "mxfp8 by torch"])
def test_rows_gathered_again_in_backward_are_those_of_each_run_of_experts(name: str) -> None:
    # more rows than are computed together: the later runs gather from the middle of the rows
    case = make_case((900, 0, 1300, 1200), num_padding_rows=3, hidden_size=256, intermediate_size=32)
    source = RowSource(torch.randn(600, 256), torch.randint(600, case.x_RD.shape[:1]))
    case.x_RD = source.rows()
    compute = build_compute(name, case)
    expected = outputs_and_gradients(compute, case)
    actual = outputs_and_gradients(lambda *operands: compute(*operands, source=source), case)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["native", "native by torch", "fp8", "mxfp8 by torch"])
@pytest.mark.parametrize("offsets", [[2, 6], [2, 1, 5], [-1, 2, 5], [1, 2, 3, 5]], ids=str)
def test_offsets_that_are_not_those_of_the_rows_and_experts_are_refused(
    name: str, offsets: list[int]
) -> None:
    case = make_case((2, 0, 3))
    case.offsets_L = torch.tensor(offsets, dtype=torch.int32)
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training), pytest.raises(ValueError, match="offsets must ascend"):
            build_compute(name, case)(case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)


@pytest.mark.parametrize("name", ["reference", "native", "bf16", "fp8", "mxfp8"])
def test_weights_may_lie_in_memory_in_any_way(name: str) -> None:
    case = make_case((40, 0, 24), num_padding_rows=2)
    expected = outputs_and_gradients(build_compute(name, case), case)
    names = ("gate_LFD", "up_LFD", "down_LDF")
    wide = [torch.zeros(*getattr(case, each).shape, 2) for each in names]
    for each, memory in zip(names, wide, strict=True):
        memory[..., 0] = getattr(case, each)
    leaves = [case.x_RD.clone().requires_grad_(), *(memory[..., 0].requires_grad_() for memory in wide)]
    y_RD = build_compute(name, case)(leaves[0], case.offsets_L, *leaves[1:])
    actual = [y_RD, *torch.autograd.grad(y_RD, leaves, case.grad_y_RD)]
    # a BLAS may choose another order of sums; measured 3e-7 in `reference`, else 0
    for value, wanted in zip(actual, expected.values(), strict=True):
        assert deviation(value, wanted) <= FP32


@pytest.mark.parametrize("name", ["native", "grouped_mm", "bf16", "fp8", "mxfp8"])
def test_a_second_derivative_is_refused(name: str) -> None:
    case = make_case((40, 0, 24))
    case.x_RD.requires_grad_()
    y_RD = compute_named(name, case)(case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)
    (gradient,) = torch.autograd.grad(y_RD.square().sum(), case.x_RD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["reference", "native", "grouped_mm", "fp8", "mxfp8"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "mish"])
def test_every_activation_reaches_outputs_and_gradients(name: str, activation: str) -> None:
    case = make_case((40, 0, 24))
    expected = outputs_and_gradients(build_compute("reference", case, activation), case.to(torch.float64))
    actual = outputs_and_gradients(compute_named(name, case, activation), case)
    tolerance = FP8 if name in ("fp8", "mxfp8") else FP32
    assert max(deviation(actual[key], expected[key]) for key in actual) <= tolerance
    other = outputs_and_gradients(build_compute("reference", case, "sigmoid"), case.to(torch.float64))
    assert min(deviation(other[key], expected[key]) for key in actual) > 0.3


@pytest.mark.parametrize("name", ["reference", "native", "grouped_mm", "bf16", "fp8", "mxfp8"])
def test_under_autocast_the_result_has_the_autocast_dtype_and_gradients_keep_theirs(name: str) -> None:
    case = make_case((40, 0, 24), num_padding_rows=2)
    expected = outputs_and_gradients(build_compute("reference", case), case.to(torch.float64))
    compute = build_compute("native", case) if name == "grouped_mm" else build_compute(name, case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = outputs_and_gradients(compute, replace(case, grad_y_RD=case.grad_y_RD.bfloat16()))
    assert actual.pop("y_RD").dtype == torch.bfloat16
    for key, value in actual.items():
        assert value.dtype == torch.float32, key
        assert deviation(value, expected[key]) <= (FP8 if name in ("fp8", "mxfp8") else BF16), key


def test_the_reference_passes_gradcheck_in_fp64() -> None:
    case = make_case((3, 0, 2), num_padding_rows=1, hidden_size=5, intermediate_size=4).to(torch.float64)
    compute = build_compute("reference", case)
    operands = [case.x_RD, case.gate_LFD, case.up_LFD, case.down_LDF]

    def layer(x_RD: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return compute(x_RD, case.offsets_L, *weights)

    assert torch.autograd.gradcheck(layer, [operand.requires_grad_() for operand in operands])


def test_the_comparison_sees_swapped_gate_and_up_weights() -> None:
    case = make_case(COUNTS[0])
    expected = outputs_and_gradients(build_compute("reference", case), case.to(torch.float64))
    swapped = replace(case, gate_LFD=case.up_LFD, up_LFD=case.gate_LFD)
    actual = outputs_and_gradients(build_compute("native", case), swapped)
    assert min(deviation(actual[key], expected[key]) for key in actual) > 100 * FP32
