"""Rows and counts between the ranks of a group, as operators that autograd and `torch.compile` see.

`afmoe::exchange_rows` is its own gradient with the directions swapped, so one operator serves all four ways:
tokens to experts, answers back, and their gradients. Activation checkpointing may name it among what is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)

from afmoe.moe.dispatch.wire import pack, unpack


def start_counts(counts_E: Tensor, group_name: str, num_ranks: int) -> Tensor:
    """Begin to tell each rank how many copies it gets for each of its experts. For `wait_counts`."""
    sizes = [counts_E.shape[0] // num_ranks] * num_ranks
    # one of torch's functional collectives: asynchronous, and a compiled graph keeps it so
    return torch.ops._c10d_functional.all_to_all_single(counts_E, sizes, sizes, group_name)


def wait_counts(arriving_E: Tensor, num_ranks: int) -> Tensor:
    """[W, L] int64, once it is there: row w holds the copies that rank w has for this rank's experts."""
    return torch.ops._c10d_functional.wait_tensor(arriving_E).view(num_ranks, -1)


@torch.library.custom_op("afmoe::exchange_rows", mutates_args=())
def exchange_rows(
    rows_RD: Tensor, sizes_2W: Tensor, num_rows: int | None, group_name: str, transport: str
) -> Tensor:
    """Send runs of rows to the ranks of a group and return those that they send here, in order of the ranks.

    `sizes_2W` (int64, on the CPU): rows for each rank, and rows from each. Rows behind the last run stay
    here. The result has `num_rows` rows, zero behind the last one received; None: as many as are received.
    `transport`: `afmoe.moe.dispatch.wire`.
    """
    sent, received = sizes_2W.tolist()
    size, end = rows_RD.shape[1], sum(received)
    packed = pack(rows_RD[: sum(sent)], transport)
    result_RD = rows_RD.new_empty(end if num_rows is None else num_rows, size)
    result_RD[end:].zero_()
    group = _resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]
    if transport == "native":
        dist.all_to_all_single(result_RD[:end], packed, received, sent, group=group)
    else:
        arrived = packed.new_empty(end, packed.shape[1])
        dist.all_to_all_single(arrived, packed, received, sent, group=group)
        result_RD[:end] = unpack(arrived, transport, size, rows_RD.dtype)
    return result_RD


@exchange_rows.register_fake
def _(rows_RD: Tensor, sizes_2W: Tensor, num_rows: int | None, group_name: str, transport: str) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    return rows_RD.new_empty(rows, rows_RD.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_RD, sizes_2W, _, ctx.group_name, ctx.transport = inputs
    ctx.num_rows = rows_RD.shape[0]
    ctx.save_for_backward(sizes_2W)


def _send_back(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None, None]:
    (sizes_2W,) = ctx.saved_tensors
    swapped_2W = sizes_2W.flip(0)
    grad_RD = exchange_rows(grad_RD, swapped_2W, ctx.num_rows, ctx.group_name, ctx.transport)
    return grad_RD, None, None, None, None


exchange_rows.register_autograd(_send_back, setup_context=_save)
