"""Where ZeRO keeps the pieces of a parameter: its fp32 weight and its optimizer states, got and set whole.

Stages 1 and 2 cut the concatenated parameters of an optimizer group into one flat tensor a rank, stage 3 cuts
each parameter; stage 0 leaves them alone. `Fragment` is what all three have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Fragment:
    """The piece of a parameter that this rank optimizes."""

    flat: Tensor
    """What the optimizer steps and keys its state by."""
    start: int
    """Where the piece begins in `flat`."""
    offset: int
    """Where it begins in the parameter."""
    size: int


class Partitions:
    """The optimizer's view of the parameters under a DeepSpeed engine. Every rank has to take part in all."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.stage = stage
        self.zero: Any = engine.optimizer
        self.optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self._group_of = {}
        if stage in (1, 2):
            self._group_of = {
                id(parameter): index
                for index, group in enumerate(self.zero.bit16_groups)
                for parameter in group
            }

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Of the whole parameter, or of this rank's experts."""
        return parameter.ds_shape if self.stage == 3 else parameter.shape  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """What the optimizer steps for `parameter` on this rank; it may hold none of it."""
        if self.stage == 0:
            return parameter
        if self.stage == 3:
            return self.zero.fp32_partitioned_groups_flat[self._position(parameter)[0]]
        return self.zero.single_partition_of_fp32_groups[self._group_of[id(parameter)]]

    def fragment(self, parameter: nn.Parameter) -> Fragment | None:
        """This rank's piece; None when it has none."""
        flat, numel = self.flat(parameter), self.shape(parameter).numel()
        if self.stage == 0:
            return Fragment(flat, 0, 0, numel)
        if self.stage == 3:
            _, start, size = self._position(parameter)
            offset = size * dist.get_rank(self._ranks(parameter))
            # the last piece is filled up
            size = min(size, numel - offset)
            return Fragment(flat, start, offset, size) if size > 0 else None
        mapping: Any = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if mapping is None:
            return None
        place, piece = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Fragment(flat, place.start, piece.start, place.numel)

    def state_keys(self, parameter: nn.Parameter) -> dict[str, bool]:
        """Names of its optimizer states; True: a number for each element, False: one for the flat tensor."""
        flat = self.flat(parameter)
        state = self.optimizer.state.get(flat, {})
        return {key: value.shape == flat.shape for key, value in state.items() if isinstance(value, Tensor)}

    def dtype(self, parameter: nn.Parameter, key: str | None = None) -> torch.dtype:
        """Of what `gather` gives."""
        return self._source(parameter, key).dtype

    def gather(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """The whole fp32 weight, or optimizer state `key`, on every rank that holds a piece."""
        fragment, source = self.fragment(parameter), self._source(parameter, key)
        device = parameter.device
        whole = torch.zeros(self.shape(parameter).numel(), dtype=source.dtype, device=device)
        if fragment is not None:
            piece = source.detach().reshape(-1).narrow(0, fragment.start, fragment.size)
            whole.narrow(0, fragment.offset, fragment.size).copy_(piece)
        if self.stage:
            dist.all_reduce(whole, group=self._ranks(parameter))
        return whole.view(self.shape(parameter))

    @torch.no_grad()
    def scatter(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Set this rank's piece of the fp32 weight, or of optimizer state `key`, from the whole."""
        flat = self.flat(parameter)
        target = flat if key is None else self._state(flat, key)
        fragment = self.fragment(parameter)
        if fragment is None:
            return
        piece = value.reshape(-1).narrow(0, fragment.offset, fragment.size)
        target.view(-1).narrow(0, fragment.start, fragment.size).copy_(piece)

    def set_scalar(self, parameter: nn.Parameter, value: Tensor, key: str) -> None:
        """Set a state that the flat tensor shares, like the count of steps, where a fused step wants it."""
        flat = self.flat(parameter)
        self.optimizer.state[flat][key] = value.to(flat.device, copy=True)

    @torch.no_grad()
    def set_module_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set what the model computes with."""
        if self.stage != 3:
            parameter.copy_(value)
            return
        with self._whole(parameter):
            parameter.copy_(value)

    def module_weight(self, parameter: nn.Parameter) -> Tensor:
        """What the model computes with; a copy where it lies in pieces."""
        if self.stage != 3:
            return parameter.detach()
        with self._whole(parameter):
            return parameter.detach().clone()

    def _whole(self, parameter: nn.Parameter) -> Any:
        import deepspeed

        # what rank 0 holds at the end becomes everybody's; all hold the same
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)

    def _source(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        flat = self.flat(parameter)
        return flat if key is None else self.optimizer.state[flat][key]

    def _state(self, flat: Tensor, key: str) -> Tensor:
        state = self.optimizer.state[flat]
        if key not in state:
            state[key] = torch.zeros_like(flat, requires_grad=False)
        return state[key]

    def _position(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        return self.zero.grad_position[self.zero.get_param_id(parameter)]

    def _ranks(self, parameter: nn.Parameter) -> Any:
        if self.stage == 3:
            return self.zero._get_param_partition_group(parameter)
        return parameter._dp_group  # pyright: ignore[reportAttributeAccessIssue]
