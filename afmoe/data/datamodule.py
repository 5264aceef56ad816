"""The Lightning data module: reads a source, plans each epoch's packs, resumes at any optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lightning import LightningDataModule
from transformers import PreTrainedTokenizerBase

from afmoe.data.batches import (
    CountFlops,
    PackBatches,
    PackLoader,
    StepLayout,
    batches_of,
    step_tokens,
)
from afmoe.data.chat import ChatRenderer, last_assistant_turn
from afmoe.data.options import DataConfig
from afmoe.data.plan import PackPlan, plan_epoch, plan_in_order
from afmoe.data.report import SplitReport
from afmoe.data.rows import BadRow, Message, Row, Source
from afmoe.data.token_rows import TokenRows, tokenize_rows
from afmoe.errors import ConfigError
from afmoe.registry import build


@dataclass(frozen=True)
class Sample:
    """A held-out row as a prompt and the answer that it should get."""

    messages: list[Message]
    """The prompt."""
    tools: list[dict[str, Any]] | None
    prompt_ids: list[int]
    """The prompt as the model reads it, up to where the answer begins."""
    target: str
    """All that the assistant writes, thoughts and tool calls included."""


@dataclass(frozen=True)
class Position:
    """Where the loader of an epoch started."""

    epoch: int = 0
    packs_consumed: int = 0
    global_step: int = 0


class AfmoeDataModule(LightningDataModule):
    """Batches of packed conversations from the source that `config` belongs to.

    Keys and dtypes of the tensors are those of `batches.make_batch`. Besides them a training batch holds the
    plain ints `num_label_tokens` and `num_real_tokens` of its whole optimizer step, over all ranks and
    micro-batches; a validation batch those of itself. `num_own_label_tokens` counts the batch's own labels.

    For a trainer with `reload_dataloaders_every_n_epochs=1` and `use_distributed_sampler=False`; without one
    it is rank 0 of 1 in epoch 0. `data.chat_template` is set on the tokenizer.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        accumulate: int = 1,
        count_flops: CountFlops | None = None,
    ) -> None:
        """`count_flops`: what the model makes of documents; training batches then hold `num_flops` too."""
        super().__init__()
        self.config, self.tokenizer, self.count_flops = config, tokenizer, count_flops
        self.before_fetch: Callable[[], None] | None = None
        """Called when a training batch is asked for; set before training starts."""
        self.seed, self.accumulate = seed, accumulate
        self.source: Source = build(config, seed=seed)
        self.renderer = ChatRenderer(tokenizer, config.chat_template)
        self._splits: dict[str, TokenRows] = {}
        self._reports: dict[str, SplitReport] = {}
        self._plan: tuple[int, PackPlan] | None = None
        self._validation_plan: PackPlan | None = None
        self._resume_at = Position()
        self._started_at = Position()

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise both splits, once. Without held-out rows the trainer is told not to validate.

        Raises `ConfigError` when nothing can be trained on.
        """
        self._resume_at = self._started_at = Position()
        if not self._splits:
            self._read()
        if self.trainer and not len(self.validation_split):
            self.trainer.limit_val_batches = 0

    @property
    def train_split(self) -> TokenRows:
        return self._splits["training"]

    @property
    def validation_split(self) -> TokenRows:
        return self._splits["validation"]

    @property
    def report(self) -> dict[str, Any]:
        """Content of `data_report.json`: figures of the training rows, under `validation` of the others."""
        return self._reports["training"].to_dict() | {"validation": self._reports["validation"].to_dict()}

    @property
    def layout(self) -> StepLayout:
        world_size = self.trainer.world_size if self.trainer else 1
        return StepLayout(self.config.batch_size, self.accumulate, world_size)

    @property
    def batches_done(self) -> int:
        """Micro-batches of the current epoch that a resumed run has behind it, in this run's batches."""
        return batches_of(self._packs_behind, self.layout)

    def train_dataloader(self) -> PackLoader:
        """What is left of the trainer's current epoch."""
        epoch, consumed = self._epoch, self._packs_behind
        self._started_at = Position(epoch, consumed, self._global_step)
        self._correct_batch_progress()
        trainer: Any = self.trainer
        # overfitting means the same packs in every epoch
        plan = self._epoch_plan(0 if trainer and trainer.overfit_batches else epoch)
        loader = self._loader(
            self.train_split,
            plan,
            self.layout,
            self.before_fetch,
            packs_consumed=consumed,
            count_flops=self.count_flops,
        )
        if trainer:
            _refuse_no_batches("train", trainer.limit_train_batches, len(loader))
            _refuse_rare_validation(trainer, len(loader))
        return loader

    def val_dataloader(self) -> PackLoader:
        """Every held-out row once."""
        assert self._validation_plan is not None
        layout = StepLayout(self.config.batch_size, 1, self.layout.world_size)
        loader = self._loader(self.validation_split, self._validation_plan, layout, counts_whole_step=False)
        if self.trainer:
            _refuse_no_batches("val", self.trainer.limit_val_batches, len(loader))
        return loader

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, from the optimizer steps done: what workers have prefetched does not count."""
        steps = self._global_step - self._started_at.global_step
        packs_per_step = self.layout.packs_per_step
        return {
            "epoch": self._started_at.epoch,
            "packs_consumed": self._started_at.packs_consumed + steps * packs_per_step,
            "packs_per_step": packs_per_step,
            "rows": self.train_split.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` says, after `setup`.

        Raises `ConfigError` for other training rows, whose plan would be another, and for another number of
        packs per step, unless `data.allow_batch_change`.
        """
        if state_dict["rows"] != self.train_split.fingerprint:
            raise ConfigError(
                "the training rows (files, tokenizer or chat template) are not those of the checkpoint; "
                "restore them, or start a new run from its weights with model.pretrained"
            )
        layout, stored = self.layout, state_dict["packs_per_step"]
        if stored != layout.packs_per_step and not self.config.allow_batch_change:
            raise ConfigError(
                f"the checkpoint was trained with {stored} packs per optimizer step, this run has "
                f"{layout.packs_per_step} (data.batch_size={layout.batch_size} x "
                f"trainer.accumulate_grad_batches={layout.accumulate} x {layout.world_size} ranks); "
                "restore the product or set data.allow_batch_change=true"
            )
        self._resume_at = self._started_at = Position(
            state_dict["epoch"], state_dict["packs_consumed"], self._global_step
        )

    def steps_for_tokens(self, num_tokens: int, *, most_steps: float, most_epochs: float) -> int | None:
        """Optimizer steps from where the run stands until `num_tokens` real tokens are reached or passed.

        None: they are not within so many further steps and epochs of the run. No later epoch is planned.
        """
        steps = 0
        # the trainer learns of its epoch later than this object of where a run continues
        resume_at = self._resume_at
        epoch = max(self._epoch, resume_at.epoch)
        consumed = resume_at.packs_consumed if epoch == resume_at.epoch else 0
        while num_tokens > 0:
            if steps >= most_steps or epoch >= most_epochs:
                return None
            tokens = step_tokens(self._epoch_plan(epoch), self.train_split.lengths, self.layout, consumed)
            reached = int(np.searchsorted(np.cumsum(tokens), num_tokens))
            if reached < len(tokens):
                steps += reached + 1
                return steps if steps <= most_steps else None
            steps, num_tokens = steps + len(tokens), num_tokens - int(tokens.sum())
            epoch, consumed = epoch + 1, 0
        return steps

    def samples(self, count: int) -> list[Sample]:
        """The first held-out rows, to show what a model answers."""
        samples: list[Sample] = []
        rows = self.source.validation_rows()
        while len(samples) < count and (row := _next_row(rows)) is not None:
            end = last_assistant_turn(row)
            result = self.renderer.render([replace(row, messages=row.messages[: end + 1])])[0]
            if isinstance(result, BadRow):
                continue
            prompt_ids = self.renderer.render_prompt(row)
            answer: Any = self.tokenizer.decode(result.input_ids[len(prompt_ids) :], skip_special_tokens=True)
            samples.append(Sample(row.messages[:end], row.tools, prompt_ids, answer))
        return samples

    def _read(self) -> None:
        for split, rows in (
            ("training", self.source.train_rows()),
            ("validation", self.source.validation_rows()),
        ):
            self._splits[split], self._reports[split] = tokenize_rows(rows, self.renderer, self.config, split)
        if not len(self.train_split):
            read, held_out = self._reports["training"].read, len(self.validation_split)
            raise ConfigError(
                f"no row to train on: {read} read, {held_out} held out ({self.source.description})"
            )
        self._validation_plan = plan_in_order(self.validation_split.lengths, **self._packing_options)
        for split, plan in (("training", self._epoch_plan(0)), ("validation", self._validation_plan)):
            report = self._reports[split]
            report.packs, report.efficiency = len(plan), self._efficiency(self._splits[split], plan)

    @property
    def _epoch(self) -> int:
        return self.trainer.current_epoch if self.trainer else 0

    @property
    def _packs_behind(self) -> int:
        """Packs of the current epoch that were consumed before this run resumed it."""
        return self._resume_at.packs_consumed if self._epoch == self._resume_at.epoch else 0

    @property
    def _global_step(self) -> int:
        return self.trainer.global_step if self.trainer else 0

    def _correct_batch_progress(self) -> None:
        """Tell a resuming trainer how many batches are done, in this run's batches.

        Its own count comes from the checkpoint. It is wrong when the epoch was over there (it is reset only
        if the next epoch is no longer), and when another batch or world size deals the same packs otherwise.
        """
        if self.trainer is None or not self.trainer.fit_loop.restarting:
            return
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready == self.batches_done:
            return
        if self._epoch == self._resume_at.epoch:
            # the whole run's count decides when to validate
            _set_batches_done(progress.total, self._global_step * self.accumulate)
        else:
            # of the epoch before: where a validation was due at its end, the new one would be over at once
            progress.is_last_batch = False
        _set_batches_done(progress.current, self.batches_done)

    @property
    def _packing_options(self) -> dict[str, Any]:
        return {"sequence_length": self.config.sequence_length, "packing": self.config.packing}

    def _epoch_plan(self, epoch: int) -> PackPlan:
        if self._plan is None or self._plan[0] != epoch:
            lengths = self.train_split.lengths
            self._plan = epoch, plan_epoch(lengths, seed=self.seed, epoch=epoch, **self._packing_options)
        return self._plan[1]

    def _loader(
        self,
        rows: TokenRows,
        plan: PackPlan,
        layout: StepLayout,
        before_fetch: Callable[[], None] | None = None,
        **options: Any,
    ) -> PackLoader:
        tokenizer: Any = self.tokenizer
        batches = PackBatches(
            rows,
            plan,
            layout,
            rank=self.trainer.global_rank if self.trainer else 0,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            pack_length=self.config.sequence_length if self.config.packing else None,
            **options,
        )
        is_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return PackLoader(
            batches,
            num_workers=self.config.num_workers,
            pin_memory=is_cuda,
            before_fetch=before_fetch,
        )

    def _efficiency(self, rows: TokenRows, plan: PackPlan) -> float:
        """Real tokens among all tokens of a pass, the filling of its last optimizer step left out."""
        if not len(plan):
            return 0.0
        if self.config.packing:
            return len(rows.input_ids) / (len(plan) * self.config.sequence_length)
        lengths, batch_size = rows.lengths[plan.rows], self.config.batch_size
        longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), batch_size))
        sizes = np.diff([*range(0, len(lengths), batch_size), len(lengths)])
        return float(lengths.sum() / (longest * sizes).sum())


def _next_row(rows: Iterator[Row | BadRow]) -> Row | None:
    return next((row for row in rows if isinstance(row, Row)), None)


def _set_batches_done(counts: Any, batches_done: int) -> None:
    # a checkpoint written at a batch's end holds it as not completed; Lightning completes it on resuming
    num_open = counts.ready - counts.completed
    counts.ready = counts.started = counts.processed = batches_done
    counts.completed = batches_done - num_open


def _refuse_no_batches(kind: str, share: Any, num_batches: int) -> None:
    """Raise `ConfigError`, where Lightning has a trace, for a share of the batches that is less than one."""
    if isinstance(share, float) and share > 0 and num_batches and int(share * num_batches) == 0:
        raise ConfigError(
            f"trainer.limit_{kind}_batches={share} is less than one of the {num_batches} micro-batches; give "
            "a whole number of them, or a larger share"
        )


def _refuse_rare_validation(trainer: Any, num_batches: int) -> None:
    """Raise `ConfigError`, where Lightning has a trace, for an interval that no epoch is long enough for."""
    interval = trainer.val_check_interval
    counts_in_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches
    if counts_in_epoch and isinstance(interval, int) and interval > num_batches:
        raise ConfigError(
            f"trainer.val_check_interval={interval} counts within an epoch, which has {num_batches} "
            "micro-batches; lower it, or count across epochs with trainer.check_val_every_n_epoch=null"
        )
