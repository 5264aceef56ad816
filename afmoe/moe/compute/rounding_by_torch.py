"""The rounding of `afmoe.moe.compute.rounding` in a few vectorized passes of torch, on any device.

It is two additions: torch's own conversion from e4m3 is scalar code on a CPU. 4,096 x 128 values on two
threads: 0.23 ms here, 1.2 ms through torch's conversions.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from afmoe.moe.grouped_mm import ExpertRun
from afmoe.moe.quantization import BLOCK_SIZE, block_scale

_CHUNK_ELEMENTS = 1 << 17
"""Values worked on at a time, so that the passes over them stay in the cache (512 KiB in fp32)."""


class TorchRounder:
    def rows(self, x_RK: Tensor, scales: str, block_size: int) -> Tensor:
        num_rows, size = x_RK.shape
        block = min(block_size, size)
        padding = -size % block
        out = x_RK.new_empty(num_rows, (size + padding) // block, block, dtype=torch.float32)
        for start, end in _chunks(num_rows, size):
            blocks = F.pad(x_RK[start:end].float(), (0, padding)).unflatten(1, (-1, block))
            _round_to_blocks(blocks, (2,), scales, out[start:end])
        return out.flatten(1)[:, :size]

    def weights(self, w_LNK: Tensor, scales: str) -> Tensor:
        num_experts, num_rows, num_columns = w_LNK.shape
        row_block, column_block = min(BLOCK_SIZE, num_rows), min(BLOCK_SIZE, num_columns)
        padding = (0, -num_columns % column_block, 0, -num_rows % row_block)
        out = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
        for start, end in _chunks(num_experts, num_rows * num_columns):
            padded = F.pad(w_LNK[start:end].float(), padding)
            blocks = padded.unflatten(2, (-1, column_block)).unflatten(1, (-1, row_block))
            rounded = _round_to_blocks(blocks, (2, 4), scales, torch.empty_like(blocks))
            out[start:end] = rounded.flatten(3).flatten(1, 2)[:, :num_rows, :num_columns]
        return out

    def weights_along_n(self, w_LNK: Tensor, scales: str, block_size: int) -> Tensor:
        num_experts, num_rows, num_columns = w_LNK.shape
        block = min(block_size, num_rows)
        padding = (0, 0, 0, -num_rows % block)
        out = w_LNK.new_empty(w_LNK.shape, dtype=torch.float32)
        for start, end in _chunks(num_experts, num_rows * num_columns):
            blocks = F.pad(w_LNK[start:end].float(), padding).unflatten(1, (-1, block))
            rounded = _round_to_blocks(blocks, (2,), scales, torch.empty_like(blocks))
            out[start:end] = rounded.flatten(1, 2)[:, :num_rows]
        return out

    def columns(self, x_RK: Tensor, run: ExpertRun, scales: str, block_size: int) -> tuple[Tensor, ExpertRun]:
        """Each expert is given whole blocks of slots."""
        row_of_slot, slots = _slots(run, block_size)
        row_of_slot, size = row_of_slot.to(x_RK.device), x_RK.shape[1]
        num_blocks = row_of_slot.shape[0] // block_size
        out = x_RK.new_empty(num_blocks, block_size, size, dtype=torch.float32)
        for start, end in _chunks(num_blocks, block_size * size):
            rows = x_RK.index_select(0, row_of_slot[start * block_size : end * block_size])
            _round_to_blocks(rows.float().unflatten(0, (-1, block_size)), (1,), scales, out[start:end])
        return out.flatten(0, 1), slots


def _slots(run: ExpertRun, block_size: int) -> tuple[Tensor, ExpertRun]:
    """The row that each slot holds, and each expert's slots."""
    rows, slots, first = [torch.empty(0, dtype=torch.int64)], [], 0
    for e, start, end in run.experts:
        padded = -(-(end - start) // block_size) * block_size
        # slots past the last row repeat it: that changes no block's maximum, and no product reads them
        rows.append(torch.arange(start, start + padded).clamp_(max=end - 1))
        slots.append((e, first, first + end - start))
        first += padded
    return torch.cat(rows), ExpertRun(run.rows, slots)


def _round_to_blocks(x: Tensor, block_dims: tuple[int, ...], scales: str, out: Tensor) -> Tensor:
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


def _chunks(count: int, size: int) -> itertools.pairwise[tuple[int, int]]:
    """Borders of runs of items of `size` values each, about `_CHUNK_ELEMENTS` a run."""
    step = max(1, _CHUNK_ELEMENTS // size)
    return itertools.pairwise([*range(0, count, step), count])
