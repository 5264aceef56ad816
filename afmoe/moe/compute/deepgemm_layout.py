"""How DeepGEMM's grouped products want their operands, in plain torch: tested on a CPU, meant for a GPU.

Layouts: tests/generators.py and csrc/apis/gemm.hpp of deepseek-ai/DeepGEMM (v2.1 and later).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.moe.quantization import BLOCK_SIZE, quantize_rows, quantize_weights

ALIGNMENT = BLOCK_SIZE
"""Each expert's rows begin at a multiple of this: a tile of the product belongs to one expert."""


@dataclass(frozen=True)
class AlignedRows:
    """Rows moved apart, so that each expert's begin at a multiple of 128. S slots, a bound: no host sync."""

    row_of_slot_S: Tensor
    is_row_S: Tensor
    """Whether a row lies in the slot; those behind an expert's rows and behind all experts are empty."""
    expert_of_slot_S: Tensor
    """int32; -1 behind all experts, where no product is computed."""
    slot_of_row_R: Tensor
    is_padding_R: Tensor
    num_slots_L: Tensor
    """Of each expert: its rows, rounded up to whole tiles."""

    @classmethod
    def of(cls, offsets_L: Tensor, num_rows: int) -> AlignedRows:
        device, num_experts = offsets_L.device, offsets_L.shape[0]
        ends_L = offsets_L.long()
        starts_L = ends_L - ends_L.diff(prepend=ends_L.new_zeros(1))
        num_slots_L = (ends_L - starts_L + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        slot_ends_L = num_slots_L.cumsum(0)
        slot_starts_L = slot_ends_L - num_slots_L
        # every expert leaves less than one tile empty
        num_slots = (num_rows // ALIGNMENT + min(num_experts, num_rows)) * ALIGNMENT
        slots_S = torch.arange(num_slots, device=device)
        expert_S = torch.searchsorted(slot_ends_L, slots_S, right=True)
        is_used_S = expert_S < num_experts
        expert_of_S = expert_S.clamp(max=num_experts - 1)
        row_S = starts_L[expert_of_S] + slots_S - slot_starts_L[expert_of_S]
        is_row_S = is_used_S & (row_S < ends_L[expert_of_S])
        rows_R = torch.arange(num_rows, device=device)
        expert_R = torch.searchsorted(ends_L, rows_R, right=True)
        expert_of_R = expert_R.clamp(max=num_experts - 1)
        slot_R = slot_starts_L[expert_of_R] + rows_R - starts_L[expert_of_R]
        is_padding_R = expert_R == num_experts
        return cls(
            row_of_slot_S=torch.where(is_row_S, row_S, 0),
            is_row_S=is_row_S,
            expert_of_slot_S=torch.where(is_used_S, expert_S, -1).to(torch.int32),
            slot_of_row_R=torch.where(is_padding_R, 0, slot_R),
            is_padding_R=is_padding_R,
            num_slots_L=num_slots_L,
        )

    def spread(self, x_RK: Tensor) -> Tensor:
        """The rows in their slots, zeros in the empty ones."""
        if x_RK.shape[0] == 0:
            return x_RK
        return x_RK.index_select(0, self.row_of_slot_S).masked_fill_(~self.is_row_S[:, None], 0.0)

    def gather(self, x_SK: Tensor) -> Tensor:
        """Back from `spread`; padding rows are exactly zero."""
        if x_SK.shape[0] == 0:
            return x_SK
        return x_SK.index_select(0, self.slot_of_row_R).masked_fill_(self.is_padding_R[:, None], 0.0)


Operand = tuple[Tensor, Tensor]
"""Codes and scales."""


def row_operand(x_SK: Tensor, scales: str) -> Operand:
    """A of `m_grouped_fp8_gemm_nt_contiguous`: codes [S, K], scales [S, K / 128]."""
    codes, scale = quantize_rows(x_SK, scales)
    return codes.contiguous(), scale.contiguous()


def weight_operands(w_LNK: Tensor, scales: str) -> tuple[Operand, Operand]:
    """B of the same call: [L, N, K] for y = x w.T, [L, K, N] for dx = dy w; a scale a 128 x 128 block."""
    codes, scale = quantize_weights(w_LNK, scales)
    forward = (codes.contiguous(), scale.contiguous())
    return forward, (codes.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous())


def column_operand(x_SM: Tensor, num_slots: list[int], scales: str, *, flat: bool) -> Operand:
    """An operand of the k-grouped calls; `num_slots` counts each expert's slots, multiples of 128.

    `flat`, `k_grouped_fp8_gemm_nt_contiguous` of sm_90: each expert's codes [M, slots] one after the other,
    scales [M, S / 128]. Else `k_grouped_fp8_gemm_tn_contiguous` of sm_100: codes [S, M], scales [S / 128, M].
    """
    used = x_SM[: sum(num_slots)]
    codes_MS, scale_MB = quantize_rows(used.t(), scales)
    if not flat:
        return codes_MS.t().contiguous(), scale_MB.t().contiguous()
    parts = codes_MS.split(num_slots, dim=1)
    return torch.cat([part.reshape(-1) for part in parts]), scale_MB.contiguous()
