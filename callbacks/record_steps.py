"""Writes `steps.jsonl`: figures of every optimizer step (`afmoe.step_records`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from afmoe.model import iter_moe_blocks
from afmoe.moe.statistics import max_violation
from afmoe.step_records import FILE, append, keep_until
from callbacks.gather_steps import GatherSteps, StepFigures


class RecordSteps(Callback):
    """Writes what has been gathered at logs and checkpoints.

    So that a run that continues from a checkpoint finds the records up to it.
    """

    def __init__(self, run_directory: Path, steps: GatherSteps) -> None:
        self.path = run_directory / FILE
        self.steps = steps
        self._layers: list[int] = []
        """Indices of the layers with experts."""
        self._is_writer = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_writer = trainer.is_global_zero
        self._layers = [block.layer_index for block in iter_moe_blocks(pl_module)]
        if self._is_writer:
            keep_until(self.path, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.is_step_end(batch_idx) and trainer.global_step % trainer.log_every_n_steps == 0:
            self._write()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write()

    def state_dict(self) -> dict[str, Any]:
        # Lightning collects a checkpoint on every rank, so all of them take part in the sums
        self._write()
        return {}

    def _write(self) -> None:
        """Write what is waiting. Every rank has to."""
        taken = self.steps.take()
        if taken and self._is_writer:
            append(self.path, self._layers, map(record, taken))


def record(figures: StepFigures) -> dict[str, Any]:
    """The line of a step."""
    values = {
        "step": figures.step,
        "loss": shortest(figures.loss),
        "gradient_norm": shortest(figures.gradient_norm),
        "lr": figures.rates,
        "tokens": figures.num_tokens,
    }
    if len(figures.counts_LE):
        values["max_violation"] = shortest(max_violation(figures.counts_LE))
        values["router_confidence"] = shortest(figures.confidence_L)
        values["counts"] = [f"{sum_:016x}" for sum_ in checksums(figures.counts_LE)]
    return values


def shortest(values: Tensor) -> Any:
    """fp32 numbers, as the doubles whose few digits give the same fp32 back: one, or a list of them."""
    numbers = values.float().numpy()
    return [float(str(number)) for number in numbers] if numbers.ndim else float(str(numbers))


def checksums(counts_LE: Tensor) -> list[int]:
    """For each row of counts, their sum weighted with odd 64-bit numbers, modulo 2^64.

    One copy moved to another expert changes it for sure, larger changes with all but 2^-64 probability.
    """
    experts = np.arange(1, counts_LE.shape[-1] + 1, dtype=np.uint64)
    # splitmix64, doi 10.1145/2660193.2660195
    with np.errstate(over="ignore"):
        mixed = experts * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        weights_E = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
        counts = counts_LE.numpy().astype(np.uint64)
        return (counts * weights_E).sum(-1, dtype=np.uint64).tolist()
