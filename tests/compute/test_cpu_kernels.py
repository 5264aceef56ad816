"""The kernels in C: products against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from expert_cases import needs_compiler
from torch import Tensor

from afmoe.moe.cpu_kernels.kernels import CpuKernels, cpu_kernels

pytestmark = needs_compiler

COUNTS = {
    "typical": [5, 1, 12, 13, 30],
    "some empty": [0, 7, 0, 0, 25, 0],
    "deep": [481, 1200, 3],
    "one": [40],
    "none": [0, 0],
}
SIZES = [(256, 128), (32, 64), (33, 17), (1, 1), (300, 47)]
TOLERANCE = 1e-6
"""Of the largest entry; measured: 3.2e-7, as for torch's product."""
each_case = pytest.mark.parametrize(("counts", "sizes"), [*itertools.product(COUNTS, SIZES)], ids=str)


@pytest.fixture
def kernels() -> CpuKernels:
    return cpu_kernels()


def table(counts: list[int], first_row: int = 0) -> Tensor:
    ends = torch.tensor(counts).cumsum(0) + first_row
    return torch.stack([torch.arange(len(counts)), ends - torch.tensor(counts), ends], 1)


def assert_near(values: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(values.double(), expected, rtol=0.0, atol=TOLERANCE * largest(expected))


def largest(values: Tensor) -> float:
    return max(values.abs().max().item(), 1e-30) if values.numel() else 1.0


@each_case
@pytest.mark.parametrize("turned", [False, True], ids=["columns adjacent", "rows adjacent"])
def test_products_of_each_expert_equal_fp64_and_nothing_else_is_written(
    kernels: CpuKernels, counts: str, sizes: tuple[int, int], turned: bool
) -> None:
    depth, columns = sizes
    experts_N3 = table(COUNTS[counts], first_row=2)
    num_rows = int(experts_N3[-1, 2]) + 3
    # a row is longer than the product's: the stride counts
    x_RK = torch.randn(num_rows, depth + 2)[:, :depth]
    w_LKN = torch.randn(len(experts_N3), columns, depth).transpose(1, 2)
    if not turned:
        w_LKN = w_LKN.contiguous()
    out_RN = torch.full((num_rows, columns + 1), 9.0)[:, :columns]
    expected = out_RN.double()
    for e, start, end in experts_N3.tolist():
        expected[start:end] = x_RK[start:end].double() @ w_LKN[e].double()

    kernels.multiply(x_RK, w_LKN, experts_N3, out_RN=out_RN)
    assert_near(out_RN, expected)
    kernels.multiply(x_RK, w_LKN, experts_N3, out_RN=out_RN, accumulate=True)
    expected[2:-3] *= 2
    assert_near(out_RN, expected)
    assert (out_RN.as_strided((num_rows, columns + 1), (columns + 1, 1))[:, -1] == 9.0).all()


@each_case
def test_weight_gradients_equal_fp64_and_are_exactly_zero_without_rows(
    kernels: CpuKernels, counts: str, sizes: tuple[int, int]
) -> None:
    rows, columns = sizes
    experts_N3 = table(COUNTS[counts])
    num_rows = int(experts_N3[-1, 2])
    grad_RN, x_RK = torch.randn(num_rows, rows), torch.randn(num_rows, columns)
    out_LNK = torch.full((len(experts_N3), rows, columns), 9.0)

    kernels.weight_gradient(grad_RN, x_RK, experts_N3, out_LNK=out_LNK)

    for e, start, end in experts_N3.tolist():
        if start == end:
            assert torch.equal(out_LNK[e], torch.zeros(rows, columns))
        assert_near(out_LNK[e], grad_RN[start:end].double().t() @ x_RK[start:end].double())


def test_weights_may_lie_in_any_way_and_a_sum_of_nothing_is_zero(kernels: CpuKernels) -> None:
    experts_N3, x_RK = table([5, 0, 14]), torch.randn(19, 40)
    w_LKN = torch.randn(3, 40, 70)
    expected, out_RN = torch.empty(19, 70), torch.empty(19, 70)
    kernels.multiply(x_RK, w_LKN, experts_N3, out_RN=expected)
    wide = torch.randn(3, 80, 140)
    wide[:, ::2, ::2] = w_LKN
    kernels.multiply(x_RK, wide[:, ::2, ::2], experts_N3, out_RN=out_RN)
    assert torch.equal(out_RN, expected)
    # no column of x: a sum of nothing, added or in place of what was there
    for accumulate in (True, False):
        kernels.multiply(x_RK[:, :0], w_LKN[:, :0], experts_N3, out_RN=out_RN, accumulate=accumulate)
        assert torch.equal(out_RN, expected if accumulate else torch.zeros(19, 70))


def test_tensors_that_do_not_fit_are_refused_before_memory_is_touched(kernels: CpuKernels) -> None:
    experts_N3, x_RK, w_LKN, out_RN = table([3]), torch.ones(3, 4), torch.ones(1, 4, 5), torch.ones(3, 5)
    mistakes = [
        (x_RK[:, :3], w_LKN, experts_N3, out_RN),
        (x_RK, w_LKN, experts_N3, out_RN[:2]),
        (x_RK, w_LKN, experts_N3, out_RN[:, :4]),
        (x_RK, w_LKN, experts_N3.int(), out_RN),
        (x_RK, w_LKN, experts_N3.expand(2, 3), out_RN),
        (x_RK, w_LKN.double(), experts_N3, out_RN),
        (x_RK.to("meta"), w_LKN, experts_N3, out_RN),
        (x_RK, w_LKN, experts_N3, torch.ones(5, 3).t()),
    ]
    for x, w, experts, out in mistakes:
        with pytest.raises(ValueError, match=r"do not fit|for fp32 on a CPU|must be adjacent"):
            kernels.multiply(x, w, experts, out_RN=out)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.weight_gradient(out_RN[:2], x_RK, experts_N3, out_LNK=torch.ones(1, 5, 4))
    with pytest.raises(ValueError, match="do not fit"):
        kernels.weight_gradient(out_RN, x_RK, experts_N3, out_LNK=torch.ones(1, 4, 5))
    assert (out_RN == 1).all()


def test_the_number_of_threads_changes_no_bit(kernels: CpuKernels) -> None:
    experts_N3 = table([100, 3, 57])
    x_RK, w_LKN = torch.randn(160, 200), torch.randn(3, 200, 96)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out_RN, out_LNK = torch.empty(160, 96), torch.empty(3, 96, 200)
        kernels.multiply(x_RK, w_LKN, experts_N3, out_RN=out_RN)
        kernels.weight_gradient(out_RN, x_RK, experts_N3, out_LNK=out_LNK)
        results.append((out_RN, out_LNK))
    assert all(torch.equal(a, b) for pair in results[1:] for a, b in zip(pair, results[0], strict=True))


def test_a_broken_number_stays_with_its_expert(kernels: CpuKernels) -> None:
    experts_N3 = table([10, 10])
    x_RK, w_LKN = torch.randn(20, 16), torch.randn(2, 16, 32)
    x_RK[3, 4] = torch.nan
    out_RN, out_LNK = torch.empty(20, 32), torch.empty(2, 32, 16)
    kernels.multiply(x_RK, w_LKN, experts_N3, out_RN=out_RN)
    kernels.weight_gradient(out_RN, x_RK, experts_N3, out_LNK=out_LNK)
    assert torch.equal(out_RN.isnan().any(1).nonzero().flatten(), torch.tensor([3]))
    assert out_LNK.isnan().flatten(1).any(1).tolist() == [True, False]
