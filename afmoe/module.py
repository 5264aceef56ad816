"""One training step, one validation step: the LightningModule between the data and the optimizer.

A step's loss is the mean over the counted labels of the whole optimizer step, all micro-batches and ranks:
each batch carries that number (`num_label_tokens`), so no communication is needed and packs with few labels
weigh little.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torchmetrics import SumMetric

from afmoe.faults import non_finite
from afmoe.losses import IGNORED
from afmoe.model import AfmoeForCausalLM
from afmoe.moe.statistics import count_routing, reset_counts
from afmoe.optim.clipping import clip_gradients
from afmoe.optim.groups import freeze_parameters, refuse_other_groups
from afmoe.optim.master_weights import MasterWeights
from afmoe.optim.schedules import refuse_without_length

Batch = dict[str, Any]


VALIDATION_FIGURES: tuple[str, ...] = ("val/loss", "val/perplexity", "val/token_accuracy")
"""What every validation logs, besides the data's `exact_match_metric`."""


class AfmoeModule(pl.LightningModule):
    """Trains an `AfmoeForCausalLM` on batches of `AfmoeDataModule`."""

    def __init__(
        self,
        model: AfmoeForCausalLM,
        *,
        optim: Any,
        scheduler: Any,
        seed: int,
        exact_match_metric: str | None = None,
    ) -> None:
        """`optim` and `scheduler` are built plugins. `exact_match_metric`: name under which the share of
        documents with every label predicted right is logged at validation; None: not logged.
        """
        super().__init__()
        # now: a strategy looks at what is trained when it wraps the model
        freeze_parameters(model, optim.config)
        self.model = model
        self.optim = optim
        self.scheduler = scheduler
        self.run_seed = seed
        self.exact_match_metric = exact_match_metric
        self.step_loss: Tensor | None = None
        """This rank's share of the running optimizer step's loss; complete at the step's last micro-batch."""
        self.gradient_norm: Tensor | None = None
        """Global norm before clipping, of the last optimizer step."""
        self.bad_step: Tensor | None = None
        """fp32 scalar, the same on every rank: 1 where the last optimizer step had a loss or gradient that is
        no finite number. The optimizer has then left parameters and its state as they were.
        """
        self.skipped_step: Tensor | None = None
        """fp32 scalar, 1 where the optimizer left everything as it was in the last step: it was bad, or its
        gradients overflowed in fp16. None: it was never asked to.
        """
        self.planned_rates: tuple[Callable[[int], float], int] | None = None
        """The schedule, step -> factor on each rate, and the steps of the run that it was made for."""
        self.validation = nn.ModuleDict(
            {
                name: SumMetric(nan_strategy="disable")
                for name in ("loss_sum", "labels", "right_labels", "documents", "right_documents")
            }
        )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.step_loss = None
            reset_counts(self.model)
        number = batch_idx % self.trainer.accumulate_grad_batches
        seed = self.micro_batch_seed(self.global_step, number)
        # not torch.manual_seed: for each kind of device that is not there it notes a stack trace
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def micro_batch_seed(self, step: int, number: int) -> int:
        """Seed of a micro-batch of the optimizer step after `step`, on this rank.

        Dropout then needs no generator state to be carried over a restart.
        """
        micro_batch = step * self.trainer.accumulate_grad_batches + number
        # a generator takes 64 bits
        return ((self.run_seed * 1_000_003 + micro_batch) * 65_537 + self.global_rank) % 2**63

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        share = self.loss_share(batch)
        self.step_loss = share.detach() if self.step_loss is None else self.step_loss + share.detach()
        # Lightning divides by the micro-batches, data parallelism by the ranks; the share is already a part
        # of the sum
        return share * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def loss_share(self, batch: Batch) -> Tensor:
        """What a micro-batch adds to the loss of its optimizer step."""
        with count_routing(self.model):
            output = self.model(
                batch["input_ids"],
                batch["position_ids"],
                batch["labels"],
                attention_mask=batch["attention_mask"],
                max_labels=batch["num_own_label_tokens"],
            )
        return output.loss_sum / max(batch["num_label_tokens"], 1)

    def is_step_end(self, batch_idx: int) -> bool:
        """Whether this micro-batch is the last one of its optimizer step."""
        return (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.gradient_norm = clip_gradients(self.parameters(), self.optim.config.gradient_clip)
        self.bad_step = self.find_bad_step()
        # torch's name for it: the optimizer skips the step without the host having to know
        optimizer.found_inf = self.bad_step  # pyright: ignore[reportAttributeAccessIssue]

    def find_bad_step(self) -> Tensor:
        # the loss scale of fp16 goes up until gradients overflow: its scaler skips such a step, which is no
        # fault
        is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        bad = non_finite(self.step_loss, None if is_scaled else self.gradient_norm)
        # gradients are summed over ranks, losses are not
        return self.trainer.strategy.reduce(bad, reduce_op="max") if self.trainer.world_size > 1 else bad

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.model.on_weights_updated()

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            refuse_without_length(self.scheduler)
        total_steps = int(steps) if math.isfinite(steps) else sys.maxsize
        optimizer = self.optim.optimizer(self.model)
        optimizer.register_load_state_dict_pre_hook(refuse_other_groups)
        if isinstance(self.trainer.precision_plugin, HalfPrecision):
            optimizer = MasterWeights(optimizer)
        optimizer.register_step_post_hook(self._keep_found_inf)
        factor = self.scheduler.factor(total_steps)
        self.planned_rates = (factor, total_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "train/lr"},
        }

    def _keep_found_inf(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # torch's optimizers have the attribute only where someone has set it
        self.skipped_step = getattr(optimizer, "found_inf", None)

    def on_validation_epoch_start(self) -> None:
        # casting the module for bf16-true casts them too, and in bf16 256 + 1 is 256
        for metric in self.validation.values():
            assert isinstance(metric, SumMetric)
            metric.set_dtype(torch.float32)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.model(
            batch["input_ids"],
            batch["position_ids"],
            batch["labels"],
            attention_mask=batch["attention_mask"],
            return_predictions=True,
            max_labels=batch["num_own_label_tokens"],
        )
        self._sum("loss_sum", output.loss_sum)
        self._sum("labels", output.num_labels)
        predictions_BS = output.predictions[:, :-1]
        counted_BS = predictions_BS != IGNORED
        right_BS = predictions_BS == batch["labels"][:, 1:]
        self._sum("right_labels", (right_BS & counted_BS).sum())
        documents, right_documents = exact_documents(right_BS, counted_BS, batch["document_ids"][:, 1:])
        self._sum("documents", documents)
        self._sum("right_documents", right_documents)

    def _sum(self, name: str, value: Tensor) -> None:
        metric = self.validation[name]
        assert isinstance(metric, SumMetric)
        metric.update(value)

    def on_validation_epoch_end(self) -> None:
        total: dict[str, Tensor] = {}
        for name, metric in self.validation.items():
            assert isinstance(metric, SumMetric)
            total[name] = metric.compute()
            metric.reset()
        loss = total["loss_sum"] / total["labels"]
        accuracy = total["right_labels"] / total["labels"]
        values = dict(zip(VALIDATION_FIGURES, (loss, loss.exp(), accuracy), strict=True))
        if self.exact_match_metric is not None:
            values[self.exact_match_metric] = total["right_documents"] / total["documents"]
        self.log_dict(values)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.model.on_weights_updated()


def exact_documents(right_BS: Tensor, counted_BS: Tensor, document_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Number of documents that have counted labels, and of those with every counted label predicted right.

    `document_ids_BS` tells documents apart, -1 is padding. Nothing here depends on the data's shape, so a GPU
    is not waited for.
    """
    ids_N, counted_N, right_N = document_ids_BS.flatten(), counted_BS.flatten(), right_BS.flatten()
    # documents in the batch by rank: sorting brings a document's tokens together whatever its number is
    ids_N, order_N = ids_N.sort(stable=True)
    first_N = torch.ones_like(ids_N, dtype=torch.bool)
    first_N[1:] = ids_N[1:] != ids_N[:-1]
    slot_N = first_N.cumsum(0) - 1
    counted_N, right_N = counted_N[order_N] & (ids_N >= 0), right_N[order_N]
    zeros_N = torch.zeros_like(slot_N)
    labels_N = zeros_N.scatter_add(0, slot_N, counted_N.long())
    wrong_N = zeros_N.scatter_add(0, slot_N, (counted_N & ~right_N).long())
    return (labels_N > 0).sum(), ((labels_N > 0) & (wrong_N == 0)).sum()
