"""The quantization contract, its torch reference, and the emulation's rounding: equal bit for bit."""

from __future__ import annotations

import pytest
import torch
from expert_cases import needs_compiler
from torch import Tensor

from afmoe.moe.compute.rounding import Fp8Rounding, Mxfp8Rounding, Rounder
from afmoe.moe.compute.rounding_by_kernels import KernelRounder
from afmoe.moe.compute.rounding_by_torch import TorchRounder
from afmoe.moe.cpu_kernels.kernels import cpu_kernels
from afmoe.moe.grouped_mm import Segments
from afmoe.moe.quantization import (
    BLOCK_SIZE,
    E4M3_MAX,
    MX_BLOCK_SIZE,
    SCALE_FORMATS,
    dequantize_columns,
    dequantize_mx_weights,
    dequantize_rows,
    dequantize_weights,
    quantize_columns,
    quantize_mx_weights,
    quantize_rows,
    quantize_weights,
    round_up_to_power_of_two,
)

each_block_format = pytest.mark.parametrize(
    ("scales", "block_size"), [("fp32", BLOCK_SIZE), ("ue8m0", BLOCK_SIZE), ("ue8m0", MX_BLOCK_SIZE)]
)
each_scale_format = pytest.mark.parametrize("scales", SCALE_FORMATS)


@pytest.fixture(params=["torch", pytest.param("kernels", marks=needs_compiler)])
def rounder(request: pytest.FixtureRequest) -> Rounder:
    return TorchRounder() if request.param == "torch" else KernelRounder(cpu_kernels())


def spread(*shape: int) -> Tensor:
    """Values over twelve decades; among them zeros, subnormal codes, ties of rounding and a tiny block."""
    x = torch.randn(shape) * 10.0 ** torch.randint(-6, 6, (*shape[:-1], 1))
    x[..., 0] *= 1e-3
    x[..., 1] = 0.0
    flat = x.view(-1, shape[-1])
    if len(flat) > 3:
        flat[0] = 0.0
        flat[1] = 1e-30
        # with a largest value of 448 the scale is 1, and these lie between two codes
        ties = torch.tensor([448.0, 17.0, 19.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -17.0])
        flat[2] = 0.0
        flat[2, : len(ties)] = ties[: shape[-1]]
    return x


@each_block_format
@pytest.mark.parametrize("shape", [(0, 64), (5, 8), (130, 64), (40, 128), (9, 200), (3000, 256)], ids=str)
def test_emulated_rows_equal_the_contract_bit_for_bit(
    rounder: Rounder, shape: tuple[int, int], scales: str, block_size: int
) -> None:
    x_RK = spread(*shape)
    expected = dequantize_rows(*quantize_rows(x_RK, scales, block_size), block_size)
    assert torch.equal(rounder.rows(x_RK, scales, block_size), expected)


@each_scale_format
@pytest.mark.parametrize("shape", [(3, 16, 8), (2, 130, 64), (2, 128, 256), (5, 200, 300)], ids=str)
def test_emulated_weights_equal_the_contract_bit_for_bit(
    rounder: Rounder, shape: tuple[int, int, int], scales: str
) -> None:
    w_LNK = spread(*shape)
    expected = dequantize_weights(*quantize_weights(w_LNK, scales))
    for rounded_LNK in Fp8Rounding(rounder, scales).weights(w_LNK, backward=True):
        assert torch.equal(rounded_LNK, expected)


@pytest.mark.parametrize("shape", [(3, 16, 8), (2, 130, 64), (2, 128, 256), (5, 200, 300)], ids=str)
def test_emulated_mx_weights_equal_the_contract_bit_for_bit(
    rounder: Rounder, shape: tuple[int, int, int]
) -> None:
    w_LNK = spread(*shape)
    forward_LNK, backward_LNK = Mxfp8Rounding(rounder).weights(w_LNK, backward=True)
    for rounded_LNK, dim in ((forward_LNK, 2), (backward_LNK, 1)):
        codes, scale = quantize_mx_weights(w_LNK, dim)
        blocks = list(shape)
        blocks[dim] = -(-shape[dim] // MX_BLOCK_SIZE)
        assert list(scale.shape) == blocks
        assert torch.equal(rounded_LNK, dequantize_mx_weights(codes, scale, dim))


@each_block_format
@pytest.mark.parametrize("size", [8, 64, 130, 300])
def test_emulated_columns_equal_the_contract_bit_for_bit(
    rounder: Rounder, size: int, scales: str, block_size: int
) -> None:
    offsets_L = torch.tensor([0, 127, 128, 128, 257, 385, 1700], dtype=torch.int32)
    x_RK = spread(1710, size)
    (run,) = Segments.of(offsets_L, num_experts=7, num_rows=1710).runs(max_rows=2000)
    rounded, slots = rounder.columns(x_RK, run, scales, block_size)
    actual = torch.cat([rounded[start:end] for _, start, end in slots.experts])
    codes, scale = quantize_columns(x_RK, offsets_L, scales, block_size)
    expected = dequantize_columns(codes, scale, offsets_L, block_size)
    assert expected.shape == (1700, size)
    assert torch.equal(actual, expected)


def test_codes_and_scales_are_those_of_a_block_worked_out_by_hand() -> None:
    x_RK = torch.zeros(1, 130)
    # ties go to the even mantissa: 17 -> 16, 19 -> 20; 2^-10 is half of the smallest code and goes to 0
    x_RK[0, :5] = torch.tensor([448.0, 17.0, 19.0, -17.5, 2.0**-10])
    x_RK[0, 128:] = torch.tensor([4.48, -2.24])
    codes_RK, scale_RB = quantize_rows(x_RK, "fp32")
    assert codes_RK[0, :5].float().tolist() == [448.0, 16.0, 20.0, -18.0, 0.0]
    assert codes_RK[0, 128:].float().tolist() == [448.0, -224.0]
    torch.testing.assert_close(scale_RB, torch.tensor([[1.0, 0.01]]), rtol=1e-6, atol=0)
    codes_RK, scale_RB = quantize_rows(x_RK, "ue8m0")
    assert scale_RB.tolist() == [[1.0, 2.0**-6]]
    assert codes_RK[0, 128:].float().tolist() == [288.0, -144.0]


def test_mx_codes_and_scales_are_those_of_blocks_worked_out_by_hand() -> None:
    x_RK = torch.zeros(1, 40)
    # a largest value of 449 needs the scale 2: 17 becomes 8.5, between 8 and 9, and ties go to the even one
    x_RK[0, :2] = torch.tensor([449.0, 17.0])
    x_RK[0, 32:34] = torch.tensor([448.0, 17.0])
    codes_RK, scale_RB = quantize_rows(x_RK, "ue8m0", MX_BLOCK_SIZE)
    assert scale_RB.tolist() == [[2.0, 1.0]]
    assert codes_RK[0, :2].float().tolist() == [224.0, 8.0]
    assert codes_RK[0, 32:34].float().tolist() == [448.0, 16.0]


def test_scales_round_up_to_powers_of_two() -> None:
    scales = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 2.0**-40, float("inf")])
    assert round_up_to_power_of_two(scales).tolist() == [1.0, 2.0, 1.0, 4.0, 2.0**-40, float("inf")]
    assert round_up_to_power_of_two(torch.tensor([float("nan")])).isnan().all()


@each_scale_format
def test_no_code_is_lost_to_overflow_and_blocks_do_not_touch_each_other(scales: str) -> None:
    x_RK = torch.randn(64, 256)
    codes_RK, scale_RB = quantize_rows(x_RK, scales)
    assert codes_RK.float().abs().max() <= E4M3_MAX
    x_RK[:, 128:] *= 1e4
    codes_after, scale_after = quantize_rows(x_RK, scales)
    assert torch.equal(codes_RK[:, :128].float(), codes_after[:, :128].float())
    assert torch.equal(scale_RB[:, 0], scale_after[:, 0])


@each_scale_format
def test_a_broken_block_stays_visible(rounder: Rounder, scales: str) -> None:
    offsets_L = torch.tensor([2], dtype=torch.int32)
    (run,) = Segments.of(offsets_L, num_experts=1, num_rows=2).runs(max_rows=2)
    for value in (float("inf"), float("nan")):
        x_RK = torch.randn(2, 256)
        x_RK[0, 3] = value
        rounded = rounder.rows(x_RK, scales, BLOCK_SIZE)
        contract = dequantize_rows(*quantize_rows(x_RK, scales))
        assert torch.equal(rounded.isnan(), contract.isnan())
        assert rounded[0, :128].isnan().any()
        assert rounded[0, 128:].isfinite().all()
        assert rounded[1].isfinite().all()
        columns, _ = rounder.columns(x_RK, run, scales, BLOCK_SIZE)
        assert columns[:, 3].isnan().any()
        assert columns[:2].isfinite().all(0).sum() == 255


@each_block_format
def test_one_product_has_the_rounding_error_of_e4m3(rounder: Rounder, scales: str, block_size: int) -> None:
    x_RK, w_NK = torch.randn(256, 256), torch.randn(1, 128, 256)
    exact = x_RK.double() @ w_NK[0].double().t()
    is_mx = block_size == MX_BLOCK_SIZE
    rounding = Mxfp8Rounding(rounder) if is_mx else Fp8Rounding(rounder, scales)
    w_rounded, _ = rounding.weights(w_NK, backward=False)
    rounded = rounding.rows(x_RK).double() @ w_rounded[0].double().t()
    # about 2.6e-2 an operand on Gaussian data: 3.7e-2 together
    assert 1e-2 <= ((rounded - exact).norm() / exact.norm()).item() <= 5e-2
