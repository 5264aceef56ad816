"""What a row looks like on the wire between ranks.

- `native`: as it is.
- `bf16`: rounded to bf16 and given its dtype again: half the bytes of fp32.
- `mxfp8`: 1 x 32 blocks of `afmoe.moe.quantization`, e4m3 codes, then the blocks' exponents (e8m0), both as
  bytes: 33 bytes for 32 values, 0.516 of bf16. The experts get the restored values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afmoe.moe.quantization import MX_BLOCK_SIZE, dequantize_rows, quantize_rows

TRANSPORTS = ("native", "bf16", "mxfp8")


def bytes_per_row(transport: str, size: int, dtype: torch.dtype) -> int:
    """Bytes that one row of `size` values of `dtype` takes on the wire."""
    if transport == "mxfp8":
        return size + -(-size // MX_BLOCK_SIZE)
    return size * (torch.bfloat16 if transport == "bf16" else dtype).itemsize


def pack(rows_RD: Tensor, transport: str) -> Tensor:
    """What is sent of the rows, a row each. gloo moves no float8, so codes travel as bytes."""
    if transport == "native":
        return rows_RD.contiguous()
    if transport == "bf16":
        return rows_RD.bfloat16().contiguous()
    codes_RD, scale_RB = quantize_rows(rows_RD, "ue8m0", MX_BLOCK_SIZE)
    # the exponent's byte of an fp32 power of two is its e8m0 code; infinity and NaN become e8m0's NaN
    exponents_RB = (scale_RB.view(torch.int32) >> 23).to(torch.uint8)
    return torch.cat([codes_RD.contiguous().view(torch.uint8), exponents_RB], 1)


def unpack(packed: Tensor, transport: str, size: int, dtype: torch.dtype) -> Tensor:
    """The rows [R, size] of `dtype` that `packed` stands for."""
    if transport != "mxfp8":
        return packed.to(dtype)
    codes_RD = packed[:, :size].view(torch.float8_e4m3fn)
    scale_RB = (packed[:, size:].to(torch.int32) << 23).view(torch.float32)
    return dequantize_rows(codes_RD, scale_RB, MX_BLOCK_SIZE).to(dtype)
