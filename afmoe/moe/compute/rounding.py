"""Quantize and restore in one step: each value becomes the nearest that an fp8 code of its block stands for.

Bit for bit `dequantize(quantize(x))` of `afmoe.moe.quantization`, in fp32 and a few vectorized passes. The
rounding is two additions: torch's own conversion from e4m3 is scalar code on a CPU. 4,096 x 128 values on two
threads: 0.23 ms here, 1.2 ms through torch's conversions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.moe.quantization import BLOCK_SIZE, MX_BLOCK_SIZE, block_scale

CHUNK_ELEMENTS = 1 << 17
"""Values worked on at a time, so that the passes over them stay in the cache (512 KiB in fp32)."""


class Rounding(Protocol):
    """A block format of `afmoe.moe.quantization` for the operands of the experts' products."""

    @property
    def block_size(self) -> int: ...

    @property
    def scales(self) -> str: ...

    def weights(self, w_LNK: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        """The weights of y = x w.T and those of dx = dy w. Without `backward` the second may be the first."""
        ...


@dataclass(frozen=True)
class Fp8Rounding:
    """1 x 128 rows, 128 x 128 weights: one copy serves both products."""

    scales: str
    block_size = BLOCK_SIZE

    def weights(self, w_LNK: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        rounded_LNK = round_weights(w_LNK, self.scales)
        return rounded_LNK, rounded_LNK


@dataclass(frozen=True)
class Mxfp8Rounding:
    """1 x 32 rows and weights, along the dimension that a product sums over."""

    scales = "ue8m0"
    block_size = MX_BLOCK_SIZE

    def weights(self, w_LNK: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        forward_LNK = round_mx_weights(w_LNK, 2)
        return forward_LNK, round_mx_weights(w_LNK, 1) if backward else forward_LNK


def round_to_blocks(x: Tensor, block_dims: tuple[int, ...], scales: str, out: Tensor) -> Tensor:
    """Write the rounded values of x (fp32, already split into blocks, which span `block_dims`) to `out`."""
    scratch = x.abs()
    amax = scratch
    # one dim at a time: a reduction over two dims at once is not vectorized
    for dim in sorted(block_dims, reverse=True):
        amax = amax.amax(dim, keepdim=True)
    scale = block_scale(amax, scales)
    torch.div(x, scale, out=out)
    # 2^e <= |value| < 2^(e+1), from -6 on, where the subnormal codes begin
    torch.bitwise_and(out.view(torch.int32), 0x7F800000, out=scratch.view(torch.int32))
    scratch.clamp_min_(2.0**-6)
    # 1.5 * 2^20 * 2^e has a last bit worth 2^(e-3), the distance of two e4m3 codes: adding it rounds to that
    out.add_(scratch, alpha=1.5 * 2**20).sub_(scratch, alpha=1.5 * 2**20)
    return out.mul_(scale)


def round_rows(x_RK: Tensor, scales: str, block_size: int = BLOCK_SIZE) -> Tensor:
    """fp32 values of x in 1 x block_size blocks."""
    num_rows, size = x_RK.shape
    block = min(block_size, size)
    padding = -size % block
    out = x_RK.new_empty(num_rows, (size + padding) // block, block, dtype=torch.float32)
    for start, end in _chunks(num_rows, size):
        blocks = F.pad(x_RK[start:end].float(), (0, padding)).unflatten(1, (-1, block))
        round_to_blocks(blocks, (2,), scales, out[start:end])
    return out.flatten(1)[:, :size]


def round_weights(w_LNK: Tensor, scales: str) -> Tensor:
    """fp32 values of the weights in 128 x 128 blocks."""
    num_experts, num_rows, num_columns = w_LNK.shape
    row_block, column_block = min(BLOCK_SIZE, num_rows), min(BLOCK_SIZE, num_columns)
    padding = (0, -num_columns % column_block, 0, -num_rows % row_block)
    out = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
    for start, end in _chunks(num_experts, num_rows * num_columns):
        padded = F.pad(w_LNK[start:end].float(), padding)
        blocks = padded.unflatten(2, (-1, column_block)).unflatten(1, (-1, row_block))
        rounded = round_to_blocks(blocks, (2, 4), scales, torch.empty_like(blocks))
        out[start:end] = rounded.flatten(3).flatten(1, 2)[:, :num_rows, :num_columns]
    return out


def round_mx_weights(w_LNK: Tensor, dim: int) -> Tensor:
    """fp32 values of the weights in blocks of 32 along `dim`, 1 or 2."""
    if dim == 2:
        return round_rows(w_LNK.flatten(0, 1), "ue8m0", MX_BLOCK_SIZE).view(w_LNK.shape)
    num_experts, num_rows, num_columns = w_LNK.shape
    block = min(MX_BLOCK_SIZE, num_rows)
    padding = (0, 0, 0, -num_rows % block)
    out = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
    for start, end in _chunks(num_experts, num_rows * num_columns):
        blocks = F.pad(w_LNK[start:end].float(), padding).unflatten(1, (-1, block))
        rounded = round_to_blocks(blocks, (2,), "ue8m0", torch.empty_like(blocks))
        out[start:end] = rounded.flatten(1, 2)[:, :num_rows]
    return out


def round_columns(x_RK: Tensor, blocks: ColumnBlocks, scales: str) -> Tensor:
    """fp32 values of x in blocks down each expert's rows, in the rows of `blocks`."""
    size, block_size = x_RK.shape[1], blocks.block_size
    num_blocks = blocks.row_of_slot.shape[0] // block_size
    out = x_RK.new_empty(num_blocks, block_size, size, dtype=torch.float32)
    for start, end in _chunks(num_blocks, block_size * size):
        slots = blocks.row_of_slot[start * block_size : end * block_size]
        rows = x_RK.index_select(0, slots).float().unflatten(0, (-1, block_size))
        round_to_blocks(rows, (1,), scales, out[start:end])
    return out.flatten(0, 1)


def _chunks(count: int, size: int) -> itertools.pairwise[tuple[int, int]]:
    """Borders of runs of items of `size` values each, about `CHUNK_ELEMENTS` a run."""
    step = max(1, CHUNK_ELEMENTS // size)
    return itertools.pairwise([*range(0, count, step), count])


@dataclass(frozen=True)
class ColumnBlocks:
    """Each expert's rows, given whole blocks of slots."""

    block_size: int
    row_of_slot: Tensor
    slots: list[tuple[int, int, int]]
    """(expert, first slot, slot after its last row) of each expert."""

    @classmethod
    def of(
        cls, experts: list[tuple[int, int, int]], device: torch.device, block_size: int = BLOCK_SIZE
    ) -> ColumnBlocks:
        """`experts`: (expert, first row, row after the last), at least one, each with rows."""
        rows, slots, first = [], [], 0
        for e, start, end in experts:
            padded = -(-(end - start) // block_size) * block_size
            # slots past the last row repeat it: that changes no block's maximum, and no product reads them
            rows.append(torch.arange(start, start + padded).clamp_(max=end - 1))
            slots.append((e, first, first + end - start))
            first += padded
        return cls(block_size, torch.cat(rows).to(device), slots)
