"""Two real ranks: their batches together are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer

from afmoe.data.datamodule import AfmoeDataModule
from afmoe.data.tokenizer import load_tokenizer
from afmoe.registry import configure


class Recorder(LightningModule):
    """Writes what its rank was fed to a file."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.directory = directory
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.trained.append(
            [batch["document_ids"].tolist(), batch["num_label_tokens"], batch["num_real_tokens"]]
        )
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(batch["document_ids"].tolist())

    def on_train_end(self) -> None:
        path = self.directory / f"rank-{self.global_rank}.json"
        path.write_text(json.dumps({"train": self.trained, "validation": self.validated}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(directory: Path, num_ranks: int, accumulate: int) -> list[dict[str, Any]]:
    directory.mkdir()
    options = {"name": "reverse_text", "num_train_rows": 50, "num_validation_rows": 9, "sequence_length": 96}
    config = configure("data", options | {"batch_size": 2})
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp_spawn" if num_ranks > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(
        Recorder(directory),
        datamodule=AfmoeDataModule(config, load_tokenizer(), seed=0, accumulate=accumulate),
    )
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_get_what_one_gets_in_twice_as_many_micro_batches(tmp_path: Path):
    [one] = fit(tmp_path / "one", num_ranks=1, accumulate=2)
    two = fit(tmp_path / "two", num_ranks=2, accumulate=1)
    assert len(two[0]["train"]) == len(two[1]["train"]) > 3
    # micro-batches go to the ranks in turn, and each knows the figures of the whole step
    assert [batch for pair in zip(two[0]["train"], two[1]["train"], strict=True) for batch in pair] == one[
        "train"
    ]
    held_out = [
        sorted({row for batch in rank["validation"] for pack in batch for row in pack} - {-1}) for rank in two
    ]
    assert len(two[0]["validation"]) == len(two[1]["validation"])
    assert sorted(held_out[0] + held_out[1]) == list(range(9))
