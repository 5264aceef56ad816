"""Figures of every optimizer step: gathered on the device, brought to the host together, logged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from callbacks.moe_callback import routing_statistics

_RECENT_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One optimizer step, on the host. Sums are over all ranks and micro-batches."""

    step: int
    """Its number, from 1."""
    loss: Tensor
    """fp32 scalar, as the next one."""
    gradient_norm: Tensor
    """Before clipping."""
    rates: float | list[float]
    """The learning rate; a list where parameter groups differ."""
    num_tokens: int
    """Real tokens that were trained on."""
    counts_LE: Tensor
    """Routed copies per expert, int64, one row a MoE block; [0, 0] where the model has none."""
    confidence_L: Tensor
    """The router's confidence, fp32, mean over the routed tokens (`RoutingStatistics.confidence`)."""


class GatherSteps(Callback):
    """Keeps each step's figures on the device and reads them back at logs and when asked, so no step waits.

    Logs loss and gradient norm. Stands before the callbacks that use what it has read.
    """

    def __init__(self) -> None:
        self.recent_losses: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Of the last steps read, those of earlier processes too."""
        self.last: StepFigures | None = None
        """The last step read."""
        self._unclaimed: list[StepFigures] = []
        """Read, and not taken yet."""
        self._known: list[tuple[int, float | list[float], int]] = []
        """What is known without the device of each step not read yet: number, learning rate, tokens."""
        self._scalars: list[Tensor] = []
        """[2 + L] fp32: this rank's share of the loss, the gradient norm, sums of the router's confidence."""
        self._counts: list[Tensor] = []
        """[L, E + 1] int64: this rank's routed copies per expert, and its tokens."""
        self._rates: float | list[float] = 0.0
        self._trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates = rates[0] if len(set(rates)) == 1 else rates

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self._known.append((trainer.global_step, self._rates, batch["num_real_tokens"]))
        statistics = routing_statistics(pl_module)
        # DeepSpeed's norm is a number of the host
        scalars = [pl_module.step_loss, pl_module.gradient_norm.to(pl_module.step_loss.device)]
        scalars += [counted.confidence_sum for counted in statistics]
        self._scalars.append(torch.stack(scalars))
        if statistics:
            counts_LE = torch.stack([counted.counts_E for counted in statistics])
            tokens_L = torch.stack([counted.num_tokens for counted in statistics])
            self._counts.append(torch.cat([counts_LE, tokens_L[:, None]], 1))
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self.read()
            assert self.last is not None
            pl_module.log("train/loss", self.last.loss, prog_bar=True)
            pl_module.log("train/gradient_norm", self.last.gradient_norm)

    def read(self) -> None:
        """Bring what was gathered to the host: one sum over the ranks of each dtype, one copy. Every rank has
        to.
        """
        if not self._known:
            return
        known, self._known = self._known, []
        scalars_nX, self._scalars = torch.stack(self._scalars), []
        norms_n = scalars_nX[:, 1].clone()
        parts = [self._sum(scalars_nX).double(), norms_n[:, None].double()]
        shape = (0, 1)
        if self._counts:
            counts_nLX, self._counts = self._sum(torch.stack(self._counts)), []
            shape = counts_nLX.shape[1:]
            parts.append(counts_nLX.flatten(1).double())
        # fp64 holds fp32 numbers, and whole ones below 2^53, exactly: both dtypes travel in one copy
        host_nX = torch.cat(parts, 1).cpu()
        sums_nX, norms_n1, counts_nX = host_nX.split([scalars_nX.shape[1], 1, shape[0] * shape[1]], 1)
        norms_n, sums_nX = norms_n1[:, 0].float(), sums_nX.float()
        counts_nLX = counts_nX.long().unflatten(1, shape)
        for row, (step, rates, num_tokens) in enumerate(known):
            figures = StepFigures(
                step=step,
                loss=sums_nX[row, 0],
                gradient_norm=norms_n[row],
                rates=rates,
                num_tokens=num_tokens,
                counts_LE=counts_nLX[row, :, :-1],
                confidence_L=sums_nX[row, 2:] / counts_nLX[row, :, -1].clamp(min=1),
            )
            self._unclaimed.append(figures)
            self.recent_losses.append(float(figures.loss))
            self.last = figures

    def take(self) -> list[StepFigures]:
        """The steps since the last taking, in order. Every rank has to."""
        self.read()
        taken, self._unclaimed = self._unclaimed, []
        return taken

    def _sum(self, tensor: Tensor) -> Tensor:
        return self._trainer.strategy.reduce(tensor, reduce_op="sum")
