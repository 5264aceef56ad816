"""The data module alone and under a real Trainer: figures, resuming at any step, no validation, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from afmoe.data.datamodule import AfmoeDataModule
from afmoe.data.plan import plan_epoch
from afmoe.data.tokenizer import load_tokenizer
from afmoe.errors import ConfigError
from afmoe.registry import configure

# of Lightning with this torch, not of ours
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

SMALL = {
    "name": "reverse_text",
    "num_train_rows": 60,
    "num_validation_rows": 10,
    "sequence_length": 96,
    "batch_size": 2,
}


def data_module(accumulate: int = 1, seed: int = 0, **options: Any) -> AfmoeDataModule:
    return AfmoeDataModule(
        configure("data", SMALL | options), load_tokenizer(), seed=seed, accumulate=accumulate
    )


class Recorder(LightningModule):
    """Keeps what it is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[list[int]]]] = []
        self.validated: list[int] = []
        self.validated_at: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch["document_ids"].tolist()))
        return self.weight * batch["num_label_tokens"]

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated += batch["document_ids"].unique().tolist()

    def on_validation_end(self) -> None:
        self.validated_at.append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class SaveAfterValidation(SaveAt):
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Not then."""


def fit(module: AfmoeDataModule, checkpoint: Path | None = None, **options: Any) -> Recorder:
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=module.accumulate,
        **options,
    )
    trainer.fit(recorder, datamodule=module, ckpt_path=checkpoint, weights_only=checkpoint is None)
    return recorder


def num_steps_of_an_epoch(**options: Any) -> int:
    module = data_module(**options)
    module.setup()
    return len(module.train_dataloader()) // module.accumulate


# the border of an epoch, the steps around it, and the middle of the second
@pytest.mark.parametrize("steps_after_the_epoch", [-2, -1, 0, 1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_gets_exactly_the_batches_that_were_left(
    accumulate: int, steps_after_the_epoch: int, tmp_path: Path
):
    stop = num_steps_of_an_epoch(accumulate=accumulate) + steps_after_the_epoch
    path, length = tmp_path / "run.ckpt", stop + 6
    whole = fit(data_module(accumulate), max_steps=length, callbacks=[SaveAt(stop, path)])
    rest = fit(data_module(accumulate), path, max_steps=length)
    assert len(whole.seen) == length * accumulate
    assert rest.seen == whole.seen[stop * accumulate :]


def test_a_resumed_run_with_workers_is_not_ahead_by_what_they_had_prefetched(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    whole = fit(data_module(num_workers=2), max_steps=6, callbacks=[SaveAt(3, path)])
    rest = fit(data_module(num_workers=2), path, max_steps=6)
    assert rest.seen == whole.seen[3:]
    assert whole.seen == fit(data_module(), max_steps=6).seen


# Lightning forgets an epoch that was over at the checkpoint only when the next one is no longer
@pytest.mark.parametrize("change", [1, -1])
def test_a_run_resumes_between_epochs_of_different_length(change: int, tmp_path: Path):
    options = {"num_train_rows": 1200, "max_length": 20, "sequence_length": 128, "batch_size": 16}
    module = data_module(seed=4, **options)
    module.setup()
    lengths = module.train_split.lengths
    steps = [
        -(-len(plan_epoch(lengths, sequence_length=128, packing=True, seed=4, epoch=epoch)) // 16)
        for epoch in range(6)
    ]
    border = next(epoch for epoch in range(5) if steps[epoch + 1] - steps[epoch] == change)
    stop, length = sum(steps[: border + 1]), sum(steps[: border + 2]) + 2
    path = tmp_path / "run.ckpt"
    whole = fit(data_module(seed=4, **options), max_steps=length, callbacks=[SaveAt(stop, path)])
    rest = fit(data_module(seed=4, **options), path, max_steps=length)
    assert rest.seen == whole.seen[stop:]


@pytest.mark.parametrize("val_check_interval", [5, 1.0])
def test_a_run_resumes_from_a_validation_inside_and_at_the_end_of_an_epoch(
    val_check_interval: Any, tmp_path: Path
):
    options = {"limit_val_batches": 1, "val_check_interval": val_check_interval}
    stop = num_steps_of_an_epoch() if val_check_interval == 1.0 else 5
    path = tmp_path / "run.ckpt"
    whole = fit(data_module(), max_steps=stop + 10, callbacks=[SaveAfterValidation(stop, path)], **options)
    rest = fit(data_module(), path, max_steps=stop + 10, **options)
    assert rest.seen == whole.seen[stop:]


@pytest.mark.parametrize("steps_after_the_epoch", [-3, -1, 0, 2])
def test_the_same_packs_in_other_batches_continue_the_run(steps_after_the_epoch: int, tmp_path: Path):
    stop = num_steps_of_an_epoch() + steps_after_the_epoch
    path = tmp_path / "run.ckpt"
    whole = fit(data_module(), max_steps=stop + 5, callbacks=[SaveAt(stop, path)])
    rest = fit(data_module(accumulate=2, batch_size=1), path, max_steps=stop + 5)
    assert packs_of(rest.seen) == packs_of(whole.seen[stop:])


@pytest.mark.parametrize("steps_after_the_epoch", [-3, 0, 2])
def test_a_resumed_run_validates_at_the_same_steps(steps_after_the_epoch: int, tmp_path: Path):
    stop = num_steps_of_an_epoch() + steps_after_the_epoch
    path, length = tmp_path / "run.ckpt", stop + 9
    options = {"max_steps": length, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    whole = fit(data_module(), callbacks=[SaveAt(stop, path)], val_check_interval=4, **options)
    same = fit(data_module(), path, val_check_interval=4, **options)
    # twice as many micro-batches
    other = fit(data_module(accumulate=2, batch_size=1), path, val_check_interval=8, **options)
    assert same.validated_at == other.validated_at == [step for step in whole.validated_at if step > stop]
    assert len(same.validated_at) >= 2


@pytest.mark.parametrize("steps_after_the_epoch", [-3, 0, 2])
def test_larger_steps_where_allowed_leave_out_no_row_of_the_epoch(steps_after_the_epoch: int, tmp_path: Path):
    stop = num_steps_of_an_epoch() + steps_after_the_epoch
    path = tmp_path / "run.ckpt"
    whole = fit(data_module(), max_epochs=2, callbacks=[SaveAt(stop, path)])
    rest = fit(data_module(batch_size=4, allow_batch_change=True), path, max_epochs=2)
    assert packs_of(rest.seen) == packs_of(whole.seen[stop:])


def packs_of(seen: list[tuple[int, list[list[int]]]]) -> list[tuple[int, list[int]]]:
    """The packs that hold rows, each with its epoch, in the order of training."""
    return [(epoch, pack) for epoch, packs in seen for pack in packs if max(pack) >= 0]


def test_every_epoch_has_every_row_once_in_another_order():
    steps = num_steps_of_an_epoch()
    seen = fit(data_module(), max_epochs=2).seen
    epochs = [
        [
            row
            for epoch, packs in seen
            if epoch == number
            for pack in packs
            for row in dict.fromkeys(pack)
            if row >= 0
        ]
        for number in (0, 1)
    ]
    assert [sorted(rows) for rows in epochs] == [list(range(60))] * 2
    assert epochs[0] != epochs[1]
    assert steps * 2 - len(seen) in (-1, 0, 1)


def test_overfitting_repeats_the_same_packs():
    seen = fit(data_module(), max_epochs=2, overfit_batches=3, limit_val_batches=0).seen
    assert [packs for _, packs in seen[:3]] == [packs for _, packs in seen[3:]]


def test_validation_sees_every_held_out_row_once():
    validated = fit(data_module(), max_steps=1, val_check_interval=1).validated
    assert sorted(row for row in validated if row >= 0) == list(range(10))


def test_a_run_without_held_out_rows_trains():
    module = data_module(num_validation_rows=0)
    recorder = fit(module, max_steps=2, val_check_interval=1)
    assert len(recorder.seen) == 2
    assert recorder.validated == []
    assert list(module.val_dataloader()) == module.samples(3) == []
    assert module.report["validation"] == {
        "read": 0,
        "used": 0,
        "dropped": {},
        "tokens": 0,
        "trainable_tokens": 0,
        "packs": 0,
        "efficiency": 0.0,
    }


def test_another_number_of_packs_per_step_is_refused_with_both_figures(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    fit(data_module(), max_steps=3, callbacks=[SaveAt(2, path)])
    with pytest.raises(ConfigError, match=r"2 packs per optimizer step, this run has 4 .*allow_batch_change"):
        fit(data_module(accumulate=2), path, max_steps=5)


def test_other_training_rows_than_the_checkpoints_are_refused(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    fit(data_module(), max_steps=3, callbacks=[SaveAt(2, path)])
    with pytest.raises(ConfigError, match=r"training rows .* are not those of the checkpoint"):
        fit(data_module(max_length=9), path, max_steps=5)


def test_where_it_is_allowed_another_step_size_continues_after_the_packs_consumed():
    module, whole = data_module(accumulate=2, allow_batch_change=True), data_module()
    for each in (module, whole):
        each.setup()
    state = whole.state_dict() | {"packs_consumed": 6}
    module.load_state_dict(state)
    # 6 packs are two steps of 4: four micro-batches of 2
    assert module.batches_done == 4
    rest = [batch["document_ids"].tolist() for batch in module.train_dataloader()]
    expected = [batch["document_ids"].tolist() for batch in whole.train_dataloader()][3:]
    assert [pack for packs in rest for pack in packs if max(pack) >= 0] == [
        pack for packs in expected for pack in packs if max(pack) >= 0
    ]
    assert module.state_dict() == state | {"packs_per_step": 4}


def test_the_same_product_of_batch_and_accumulation_continues_without_asking():
    module = data_module(accumulate=2, batch_size=1)
    module.setup()
    module.load_state_dict(module.state_dict() | {"packs_consumed": 6})
    assert module.batches_done == 6
    assert len(list(module.train_dataloader())) == len(module.train_dataloader()) - 6


def test_the_report_has_the_contracts_keys_and_true_figures(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}]}
        for n in range(1, 41)
    ]
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines[:20], "{", *lines[20:]]))
    options = {"name": "jsonl", "train_files": str(path), "validation_fraction": 0.2, "sequence_length": 128}
    module = AfmoeDataModule(configure("data", options), load_tokenizer(), seed=0)
    module.setup()
    report = module.report
    held_out = report.pop("validation")
    assert report["read"] + held_out["read"] == 41
    assert report["dropped"] == {"bad JSON": {"count": 1, "first": [f"{path}:21"]}}
    batches = list(module.train_dataloader())
    assert report["used"] == len(
        {row for batch in batches for row in batch["document_ids"].unique().tolist()} - {-1}
    )
    assert report["tokens"] == sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert report["trainable_tokens"] == sum(batch["num_label_tokens"] for batch in batches)
    assert report["packs"] == len(batches)
    assert report["efficiency"] == round(report["tokens"] / (128 * len(batches)), 4)
    assert sorted(held_out) == sorted(report)
    json.dumps(module.report)


def test_without_packing_every_pack_is_one_row_as_long_as_the_longest_of_its_batch():
    module = data_module(packing=False, batch_size=4)
    module.setup()
    batches = list(module.train_dataloader())
    for batch in batches:
        assert batch["attention_mask"].any(0).all()
        assert all(len(pack.unique()) - int(-1 in pack) == 1 for pack in batch["document_ids"])
    assert len(batches) == 15
    size = sum(batch["input_ids"].numel() for batch in batches)
    assert module.report["efficiency"] == round(module.report["tokens"] / size, 4)


def test_validation_batches_carry_their_own_figures():
    module = data_module()
    module.setup()
    loader = module.val_dataloader()
    for batch in loader:
        assert batch["num_real_tokens"] == batch["attention_mask"].sum()
        assert batch["num_label_tokens"] == batch["num_own_label_tokens"] == (batch["labels"] != -100).sum()


def test_samples_are_the_first_held_out_rows_as_prompt_and_target():
    module = data_module()
    module.setup()
    samples = module.samples(3)
    batch = next(iter(module.val_dataloader()))
    for number, sample in enumerate(samples):
        assert sample.messages == [{"role": "user", "content": sample.target[::-1]}]
        ids = batch["input_ids"][batch["document_ids"] == number].tolist()
        assert not ids or ids == [*sample.prompt_ids, *sample.target.encode(), module.tokenizer.eos_token_id]
    assert len(samples) == 3
    assert len(module.samples(100)) == 10


def test_a_samples_target_is_all_that_the_assistant_writes_in_the_last_turn(tmp_path: Path):
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": "well?"},
        {"role": "assistant", "reasoning_content": "count", "content": "ok", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    options = {"name": "jsonl", "train_files": str(path), "validation_files": str(path)}
    [sample] = AfmoeDataModule(configure("data", options), load_tokenizer(), seed=0).samples(3)
    assert [message["content"] for message in sample.messages] == ["2+2", "hm", "well?"]
    written = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    assert sample.target == f"<think>count</think>\nok{written}"


def test_a_source_without_a_usable_row_is_refused(tmp_path: Path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    options = {"name": "jsonl", "train_files": str(path)}
    module = AfmoeDataModule(configure("data", options), load_tokenizer(), seed=0)
    with pytest.raises(ConfigError, match=r"no row to train on: 0 read, 0 held out \(jsonl: empty\.jsonl"):
        module.setup()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sequence_length", 1),
        ("batch_size", 0),
        ("num_workers", -1),
        ("on_bad_row", "ignore"),
        ("max_bad_fraction", 1.5),
        ("chat_template", "missing.jinja"),
    ],
)
def test_impossible_options_are_refused(option: str, value: Any):
    with pytest.raises(ConfigError, match=f"data.{option}"):
        configure("data", {"name": "reverse_text", option: value})
