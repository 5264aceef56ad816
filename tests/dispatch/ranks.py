"""Run a function in several processes that share a gloo group."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    function: Callable[..., Any], num_ranks: int, directory: Path, *, timeout_seconds: float = 200.0
) -> list[Any]:
    """What `function()` returns in each rank. Raises with the traceback of the first rank that fails."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(function, rank, num_ranks, directory), daemon=True)
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        process.start()
    try:
        waiting = {process.sentinel: process for process in processes}
        while waiting:
            left = deadline - time.monotonic()
            ended = multiprocessing.connection.wait(list(waiting), max(left, 0.0))
            if not ended:
                raise TimeoutError(f"{num_ranks} ranks took more than {timeout_seconds} s: they hang")
            for sentinel in ended:
                process = waiting.pop(sentinel)  # pyright: ignore[reportArgumentType]
                process.join()
                if process.exitcode != 0:
                    failures = sorted(directory.glob("failure-*"))
                    raise RuntimeError("\n".join(file.read_text() for file in failures) or "a rank died")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [torch.load(directory / f"result-{rank}", weights_only=False) for rank in range(num_ranks)]


def _rank(function: Callable[..., Any], rank: int, num_ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        torch.save(function(), directory / f"result-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (directory / f"failure-{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
        # the others may wait for this rank; its own threads must not keep it
        os._exit(1)
