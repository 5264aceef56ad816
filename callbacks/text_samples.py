"""What the model answers to held-out prompts, as text in TensorBoard."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from afmoe.data.datamodule import AfmoeDataModule, Sample
from afmoe.logger.tensorboard import experiment


class TextSamples(Callback):
    """Answers the first held-out prompts greedily at each validation and writes prompt, target and output."""

    def __init__(self, data: AfmoeDataModule, count: int, max_new_tokens: int) -> None:
        self.data = data
        self.count = count
        self.max_new_tokens = max_new_tokens
        self._samples: list[Sample] | None = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._samples is None:
            self._samples = self.data.samples(self.count)
        if not self._samples:
            return
        # every rank generates: experts may live on all of them
        outputs = self._answers(pl_module, self._samples, is_alone=trainer.world_size == 1)
        writer = experiment(trainer)
        if writer is not None:
            prompts = [str(self.data.tokenizer.decode(sample.prompt_ids)) for sample in self._samples]
            rows = [
                f"| {_cell(prompt)} | {_cell(sample.target)} | {_cell(output)} |"
                for prompt, sample, output in zip(prompts, self._samples, outputs, strict=True)
            ]
            table = "\n".join(["| prompt | target | output |", "| --- | --- | --- |", *rows])
            writer.add_text("samples", table, trainer.global_step)

    def _answers(self, module: Any, samples: list[Sample], *, is_alone: bool) -> list[str]:
        tokenizer = self.data.tokenizer
        stops = [self.data.renderer.end_of_turn_id, tokenizer.eos_token_id]
        length = max(len(sample.prompt_ids) for sample in samples)
        fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ids = [[fill] * (length - len(sample.prompt_ids)) + sample.prompt_ids for sample in samples]
        mask = [[0] * (length - len(sample.prompt_ids)) + [1] * len(sample.prompt_ids) for sample in samples]
        new_BS = module.model.generate(
            torch.tensor(ids, device=module.device),
            self.max_new_tokens,
            attention_mask=torch.tensor(mask, device=module.device),
            # ranks whose tokens rounding sets apart would end at different steps, and wait for each other
            eos_token_id=stops if is_alone else None,
            pad_token_id=fill,
        )[:, length:]
        answers = [
            list(itertools.takewhile(lambda token: token not in stops, row)) for row in new_BS.tolist()
        ]
        return tokenizer.batch_decode(answers, skip_special_tokens=True)


def _cell(text: str) -> str:
    """Text that stays inside its cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>") or " "
