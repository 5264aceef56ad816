"""A row on the wire: bytes and values."""

from __future__ import annotations

import pytest
import torch

from afmoe.moe.dispatch.wire import TRANSPORTS, bytes_per_row, pack, unpack
from afmoe.moe.quantization import MX_BLOCK_SIZE, dequantize_rows, quantize_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 100])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_row_takes_the_bytes_that_are_said(transport: str, size: int, dtype: torch.dtype) -> None:
    rows_RD = torch.randn(3, size).to(dtype)
    packed = pack(rows_RD, transport)
    assert packed.shape[1] * packed.element_size() == bytes_per_row(transport, size, dtype)
    restored = unpack(packed, transport, size, dtype)
    assert restored.shape == rows_RD.shape
    assert restored.dtype == dtype


@pytest.mark.parametrize("size", [64, 100])
def test_quantized_rows_are_those_of_the_contract(size: int) -> None:
    # from the smallest scale to large values
    rows_RD = torch.randn(40, size) * torch.logspace(-20, 20, 40)[:, None]
    expected = dequantize_rows(*quantize_rows(rows_RD, "ue8m0", MX_BLOCK_SIZE), MX_BLOCK_SIZE)
    packed = pack(rows_RD, "mxfp8")
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, "mxfp8", size, torch.float32), expected)


@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan")])
def test_a_broken_block_stays_visible(broken: float) -> None:
    rows_RD = torch.ones(1, 64)
    rows_RD[0, 40] = broken
    restored = unpack(pack(rows_RD, "mxfp8"), "mxfp8", 64, torch.float32)
    assert torch.equal(restored[:, :32], rows_RD[:, :32])
    assert not restored[0, 40].isfinite()
