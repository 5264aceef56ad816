"""Writes `steps.jsonl`: figures of every optimizer step (`afmoe.step_records`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from afmoe.model import iter_moe_blocks
from afmoe.moe.statistics import max_violation
from afmoe.step_records import FILE, append, keep_until


class RecordSteps(Callback):
    """Keeps each step's figures on the device and reads them back at logs and checkpoints, all ranks' sums.

    So that a run that continues from a checkpoint finds the records up to it, and no step waits.
    """

    def __init__(self, run_directory: Path) -> None:
        self.path = run_directory / FILE
        self._plain: list[tuple[int, float | list[float], int]] = []
        """What is known without the device of each step not written yet: its number, learning rate and
        tokens.
        """
        self._scalars: list[Tensor] = []
        """[2 + L]: this rank's share of the loss, the gradient norm, sums of the router's confidence."""
        self._counts: list[Tensor] = []
        """[L, E + 1] int64: this rank's routed copies per expert, and its tokens."""
        self._rates: float | list[float] = 0.0
        self._trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            keep_until(self.path, trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates = rates[0] if len(set(rates)) == 1 else rates

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self._plain.append((trainer.global_step, self._rates, batch["num_real_tokens"]))
        statistics = [
            block.statistics for block in iter_moe_blocks(pl_module) if block.statistics is not None
        ]
        # DeepSpeed's norm is a number of the host
        scalars = [pl_module.step_loss, pl_module.gradient_norm.to(pl_module.step_loss.device)]
        scalars += [counted.confidence_sum for counted in statistics]
        self._scalars.append(torch.stack(scalars))
        if statistics:
            counts_LE = torch.stack([counted.counts_E for counted in statistics])
            tokens_L = torch.stack([counted.num_tokens for counted in statistics])
            self._counts.append(torch.cat([counts_LE, tokens_L[:, None]], 1))
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._write()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write()

    def state_dict(self) -> dict[str, Any]:
        # Lightning collects a checkpoint on every rank, so all of them take part in the sums
        self._write()
        return {}

    def _write(self) -> None:
        """Read back and write what is waiting. Every rank has to."""
        if not self._plain:
            return
        steps, rates, tokens = zip(*self._plain, strict=True)
        self._plain = []
        scalars_nX, self._scalars = torch.stack(self._scalars), []
        norms_n = scalars_nX[:, 1].clone()
        scalars_nX = self._sum(scalars_nX)
        figures: dict[str, Iterable[Any]] = {
            "step": steps,
            "loss": shortest(scalars_nX[:, 0]),
            "gradient_norm": shortest(norms_n),
            "lr": rates,
            "tokens": tokens,
        }
        if self._counts:
            counts_nLX, self._counts = self._sum(torch.stack(self._counts)), []
            counts_nLE, tokens_nL = counts_nLX[..., :-1], counts_nLX[..., -1]
            figures["max_violation"] = shortest(max_violation(counts_nLE))
            figures["router_confidence"] = shortest(scalars_nX[:, 2:] / tokens_nL.clamp(min=1))
            figures["counts"] = [[f"{sum_:016x}" for sum_ in row] for row in checksums(counts_nLE)]
        if self._trainer.is_global_zero:
            blocks = iter_moe_blocks(self._trainer.lightning_module)
            records = [
                dict(zip(figures, values, strict=True)) for values in zip(*figures.values(), strict=True)
            ]
            append(self.path, [block.layer_index for block in blocks], records)

    def _sum(self, tensor: Tensor) -> Tensor:
        return self._trainer.strategy.reduce(tensor, reduce_op="sum")


def shortest(values: Tensor) -> list[Any]:
    """fp32 numbers, as the double whose few digits give the same fp32 back; lists of them for rows."""

    def convert(value: Any) -> Any:
        return [convert(item) for item in value] if value.ndim else float(str(value))

    return [convert(value) for value in values.float().cpu().numpy()]


def checksums(counts_nLE: Tensor) -> list[list[int]]:
    """For each row of counts, their sum weighted with odd 64-bit numbers, modulo 2^64.

    One copy moved to another expert changes it for sure, larger changes with all but 2^-64 probability.
    """
    experts = np.arange(1, counts_nLE.shape[-1] + 1, dtype=np.uint64)
    # splitmix64, doi 10.1145/2660193.2660195
    with np.errstate(over="ignore"):
        mixed = experts * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        weights_E = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
        counts = counts_nLE.cpu().numpy().astype(np.uint64)
        return (counts * weights_E).sum(-1, dtype=np.uint64).tolist()
