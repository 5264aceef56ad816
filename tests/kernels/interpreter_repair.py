"""Repairs of triton 3.9.0's interpreter, for tests only, and the figures that show each fault.

The interpreter multiplies the raw bits of bf16 tiles in `tl.dot`, truncates where it casts fp32 to bf16, and
rounds fp32 to e4m3 half up with the carry or-ed into the exponent. The repair sends casts between float types
and the operands of `tl.dot` through torch's own conversions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}


def repair() -> None:
    """Patch the interpreter of this process."""
    original_convert = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in TORCH_DTYPES or target not in TORCH_DTYPES:
            return original_convert(data, source, target, rounding)
        values = _as_torch(data, source).float()
        if target == tl.float8e4nv:
            # the GPU's cast saturates; NaN stays NaN
            values = values.clamp(-448.0, 448.0)
        bits = values.to(TORCH_DTYPES[target]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
        return bits.numpy().view(f"uint{target.primitive_bitwidth}").reshape(np.shape(data))

    def dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, imprecise: Any) -> Any:
        product = _as_torch(a.data, a.dtype).float() @ _as_torch(b.data, b.dtype).float()
        return interpreter.TensorHandle(product.numpy() + accumulator.data, accumulator.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


def _as_torch(data: Any, dtype: Any) -> torch.Tensor:
    bits = np.ascontiguousarray(data).view(f"int{dtype.primitive_bitwidth}")
    return torch.from_numpy(bits.copy()).view(TORCH_DTYPES[dtype])


def faults() -> dict[str, float]:
    """How far the interpreter is off torch: relative error of a dot, values that a cast gets wrong."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, product)
    expected = a.float() @ b.float()
    # every finite e4m3 value, halves and neighbours of halves: what rounding can get wrong
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, between, between * (1 + 2**-20), between * (1 - 2**-20)])
    values = torch.nn.functional.pad(values, (0, 1024 - values.numel()))
    bf16, e4m3 = values.bfloat16(), values.to(torch.float8_e4m3fn)
    noise = torch.randn(1024, generator=generator)
    cast_bf16, cast_e4m3 = torch.empty_like(bf16), torch.empty_like(e4m3)
    _cast_kernel[(1,)](noise, cast_bf16)
    _cast_kernel[(1,)](values, cast_e4m3)
    return {
        "bf16 dot, relative error": ((product - expected).norm() / expected.norm()).item(),
        "fp32 to bf16, wrong values": float((cast_bf16 != noise.bfloat16()).sum()),
        "fp32 to e4m3, wrong values": float((cast_e4m3.view(torch.uint8) != e4m3.view(torch.uint8)).sum()),
    }


@triton.jit
def _dot_kernel(a, b, out):
    row = tl.arange(0, 32)[:, None]
    column = tl.arange(0, 32)[None, :]
    total = tl.zeros((32, 32), tl.float32)
    total = tl.dot(tl.load(a + row * 32 + column), tl.load(b + row * 32 + column), total)
    tl.store(out + row * 32 + column, total)


@triton.jit
def _cast_kernel(values, out):
    index = tl.arange(0, 1024)
    tl.store(out + index, tl.load(values + index).to(out.dtype.element_ty))
