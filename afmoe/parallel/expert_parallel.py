"""Experts shared by the ranks of a group: DeepSpeed's groups and tags, who has which, the dispatcher.

DeepSpeed knows a shared parameter by two attributes and looks for them only if it finds a module of its own
MoE class, so an empty one of that class is added. Its layer, router and dispatch are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.moe.dispatch import make_dispatcher

_MARKER = "expert_parallel_marker"
_TABLE = "__compatible_ops__"


class ExpertParallelMarker(MoE):
    """Says to the engine that there are shared experts; holds no weights and computes nothing."""

    def __init__(self, num_experts: int, ep_size: int) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.ep_size = num_experts, ep_size
        # the engine then neither writes nor reads files of single experts
        self.num_local_experts = 0
        self.expert_group_name = group_name(ep_size)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """The groups are there already."""


class ExpertRanks:
    """Who shares the experts: `ep_size` consecutive ranks have one whole set of them."""

    def __init__(self, ep_size: int, device: torch.device) -> None:
        """Makes DeepSpeed's groups, which communicate on `device`; every rank has to."""
        name = group_name(ep_size)
        if name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(ep_size)
        self.ep_size, self.device = ep_size, device
        self.group: Any = groups._get_expert_parallel_group(name)
        """The ranks that share one set."""
        self.rank = dist.get_rank(self.group)
        self._connected: AfmoeForCausalLM | None = None

    def connect(self, module: nn.Module, model: AfmoeForCausalLM) -> None:
        """Let the tokens of `model`, a part of `module` that holds this rank's experts, find the others'.

        Before optimizer and engine are made; once.
        """
        if self._connected is model:
            return
        self._connected = model
        num_experts = model.config.num_experts
        dispatcher = make_dispatcher(model.model.dispatch, num_experts=num_experts, process_group=self.group)
        own = expert_range(self.rank, num_experts, self.ep_size)
        for block in iter_moe_blocks(model):
            held = block.experts.held
            assert held == own, f"the model was made with experts {held}, this rank's are {own}"
            for parameter in block.experts.parameters():
                tags: Any = parameter
                tags.allreduce, tags.group_name = False, group_name(self.ep_size)
            block.dispatcher = dispatcher
        # where all are frozen the optimizer has no group of experts, which DeepSpeed would then miss
        if any(
            parameter.requires_grad
            for block in iter_moe_blocks(model)
            for parameter in block.experts.parameters()
        ):
            module.add_module(_MARKER, ExpertParallelMarker(num_experts, self.ep_size))

    def slice(self, whole: Tensor) -> Tensor:
        """This rank's experts of a stacked tensor."""
        return whole.chunk(self.ep_size)[self.rank]

    def gather(self, local: Tensor) -> Tensor:
        """Every expert of a stacked tensor; each rank gives its own."""
        # after training the model lies on the CPU, where NCCL does not reach
        local = local.to(self.device).contiguous()
        parts = [torch.empty_like(local) for _ in range(self.ep_size)]
        dist.all_gather(parts, local, group=self.group)
        return torch.cat(parts)

    def mark_groups(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Tell DeepSpeed which optimizer groups hold experts, under the names that they have."""
        own = group_name(self.ep_size)
        for group in param_groups:
            if is_shared(group["params"][0]):
                group["moe"] = True
                # it finds the process group by the name of the optimizer's group
                groups._get_expert_parallel_group_dict()[group["name"]] = self.group
                data_parallel = groups._get_expert_data_parallel_group_dict()
                data_parallel[group["name"]] = data_parallel[own]


def expert_range(rank: int, num_experts: int, ep_size: int) -> range:
    """The experts that a rank holds, where `ep_size` consecutive ranks have one whole set."""
    share = num_experts // ep_size
    start = rank % ep_size * share
    return range(start, start + share)


def group_name(ep_size: int) -> str:
    return f"ep_size_{ep_size}"


def is_shared(parameter: nn.Parameter) -> bool:
    """Whether ranks hold different parts of it."""
    return getattr(parameter, "allreduce", True) is False


def set_timeout_of_all_groups(timeout: timedelta) -> None:
    """DeepSpeed makes its groups with torch's own time limits: 10 minutes with NCCL, 30 with gloo."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def without_shm_comm() -> Iterator[None]:
    """Keep DeepSpeed from compiling an operation that training never calls (110 s and a C++ compiler).

    On a CPU its communication builds `shm_comm` when it starts, which serves `inference_all_reduce` only,
    unless its table of operations says that this cannot be done. The table is made by trying every compiler
    when it is first asked for. Here it is empty for the block, and as before after it.
    """
    module = deepspeed.ops.__dict__
    before = module.get(_TABLE)
    module[_TABLE] = {}
    try:
        yield
    finally:
        if before is None:
            del module[_TABLE]
        else:
            module[_TABLE] = before
