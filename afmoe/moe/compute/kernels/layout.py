# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# (triton is an optional package; what @triton.jit makes of a function is not what the checker sees)
"""Which rows belong to which tile: made on the device from the offsets, once a layer and pass.

A tile is 128 rows of one expert, the last one of an expert partly empty. Behind the experts come the tiles of
the padding rows, which every product writes as zeros, and behind those the tiles that are not needed: their
number depends on the counts, which the host does not know, so launches are sized by the bound and those tiles
end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128
UNUSED = tl.constexpr(-1)
_TILES_PER_PROGRAM = 32


def most_tiles(num_rows: int, num_experts: int) -> int:
    """Tiles of `num_rows` rows, whoever they belong to."""
    # the padding is one more segment; each but the first may begin a tile more
    return -(-num_rows // TILE_ROWS) + num_experts


@dataclass(frozen=True)
class TileLayout:
    """The tiles of `num_rows` rows, as int32 tensors on the device of the offsets."""

    offsets_L: Tensor
    tiles: Tensor
    """[3, num_tiles]: expert, first row and end row of each tile."""
    first_tile_of_expert: Tensor
    """[num_experts + 1]; the last entry is the number of the experts' tiles."""
    num_rows: int

    @classmethod
    def of(cls, offsets_L: Tensor, num_rows: int) -> TileLayout:
        num_experts = offsets_L.shape[0]
        num_tiles = most_tiles(num_rows, num_experts)
        tiles = offsets_L.new_empty((3, num_tiles), dtype=torch.int32)
        first_tile = offsets_L.new_empty(num_experts + 1, dtype=torch.int32)
        offsets_L = offsets_L.contiguous()
        _layout_kernel[(triton.cdiv(num_tiles, _TILES_PER_PROGRAM),)](
            offsets_L,
            tiles,
            first_tile,
            num_rows,
            num_tiles,
            num_experts,
            TILE=TILE_ROWS,
            SEGMENTS=triton.next_power_of_2(num_experts + 1),
            BLOCK=_TILES_PER_PROGRAM,
            enable_fp_fusion=True,
        )
        return cls(offsets_L, tiles, first_tile, num_rows)

    @property
    def num_experts(self) -> int:
        return self.offsets_L.shape[0]

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]

    @property
    def expert_of_tile(self) -> Tensor:
        """The number of experts for a tile of padding rows, -1 for one that is not needed."""
        return self.tiles[0]

    @property
    def first_row_of_tile(self) -> Tensor:
        return self.tiles[1]

    @property
    def end_row_of_tile(self) -> Tensor:
        """The row at which the tile's expert ends: it may lie in this tile or far behind it."""
        return self.tiles[2]


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _layout_kernel(
    offsets,
    tiles,
    first_tile_of_expert,
    num_rows,
    num_tiles,
    num_experts,
    TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment = tl.arange(0, SEGMENTS)
    is_expert = segment < num_experts
    start = tl.load(offsets + segment - 1, mask=(segment > 0) & (segment <= num_experts), other=0)
    end = tl.load(offsets + segment, mask=is_expert, other=0)
    end = tl.where(segment == num_experts, num_rows, end)
    count = tl.where(segment <= num_experts, tl.cdiv(end - start, TILE), 0)
    end_tile = tl.cumsum(count, 0)
    first_tile = end_tile - count
    if tl.program_id(0) == 0:
        tl.store(first_tile_of_expert + segment, first_tile, mask=segment <= num_experts)

    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.sum((end_tile[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_owner = segment[None, :] == owner[:, None]
    row = start[None, :] + (tile[:, None] - first_tile[None, :]) * TILE
    is_tile = tile < num_tiles
    end_row = tl.sum(tl.where(is_owner, end[None, :].broadcast_to(BLOCK, SEGMENTS), 0), 1)
    tl.store(tiles + tile, tl.where(owner <= num_experts, owner, UNUSED), mask=is_tile)
    tl.store(tiles + num_tiles + tile, tl.sum(tl.where(is_owner, row, 0), 1), mask=is_tile)
    tl.store(tiles + 2 * num_tiles + tile, end_row, mask=is_tile)
