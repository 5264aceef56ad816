"""Logs how evenly the routers load their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afmoe.logger.figures import log_figures
from afmoe.logger.tensorboard import experiment
from afmoe.moe.statistics import dead_experts, load_entropy, max_violation
from afmoe.registry import register
from callbacks.heat_map import heat_map
from callbacks.moe_callback import MoeCallback, routing_statistics


@register("callbacks", "load_balance")
class LoadBalance(MoeCallback):
    """Logs max violation, entropy, dead experts and router confidence, as means over the layers and for each
    layer.

    Max violation, entropy and confidence are of the logged step, dead experts and the heat map of all steps
    since the last log. Counts are summed over micro-batches and ranks; nothing is read back from the device
    between logs.
    """

    effect = "expert load logged"

    @dataclass(kw_only=True)
    class Config:
        per_layer: bool = True
        """Figures of each layer beside the mean."""
        heat_map: bool = True
        """An image of the counts, layers x experts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window_LE: Tensor | None = None
        """Counts of the steps since the last log, one row a MoE block, this rank's."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        statistics = routing_statistics(pl_module)
        counts_LE = torch.stack([counted.counts_E for counted in statistics])
        # not the same tensor twice: the reductions below work in place
        self.window_LE = counts_LE.clone() if self.window_LE is None else self.window_LE + counts_LE
        if trainer.global_step % trainer.log_every_n_steps:
            return
        sums_L2 = torch.stack(
            [torch.stack([one.confidence_sum, one.num_tokens.float()]) for one in statistics]
        )
        counts_LE, window_LE, sums_L2 = (
            trainer.strategy.reduce(tensor, reduce_op="sum")
            for tensor in (counts_LE, self.window_LE, sums_L2)
        )
        self.window_LE = None
        per_layer = {
            "moe/max_violation": max_violation(counts_LE),
            "moe/load_entropy": load_entropy(counts_LE),
            "moe/dead_experts": dead_experts(window_LE).float(),
            "moe/router_confidence": sums_L2[:, 0] / sums_L2[:, 1].clamp(min=1),
        }
        pl_module.log_dict({name: values_L.mean() for name, values_L in per_layer.items()})
        if self.config.per_layer:
            layers = [f"layer_{block.layer_index:02d}" for block in self.blocks(pl_module)]
            rows = torch.stack(list(per_layer.values())).tolist()
            figures = {
                f"{name}/{layer}": value
                for name, row in zip(per_layer, rows, strict=True)
                for layer, value in zip(layers, row, strict=True)
            }
            log_figures(trainer, figures)
        writer = experiment(trainer)
        if self.config.heat_map and writer is not None:
            writer.add_image(
                "moe/load", heat_map(window_LE.cpu().numpy()), trainer.global_step, dataformats="HWC"
            )
