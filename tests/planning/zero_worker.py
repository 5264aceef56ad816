"""One of two ranks under DeepSpeed: what its tensors take, and what it hands to collectives in one step.

    zero_worker.py SETUPS.json FOLDER

SETUPS.json lists changes to the setup of the small model; each rank writes FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from afmoe.data.datamodule import AfmoeDataModule
from afmoe.data.tokenizer import load_tokenizer
from afmoe.module import AfmoeModule
from afmoe.registry import build, configure
from tests.parallel.worker import drawn_model
from tests.planning.small_model import config, num_bytes, setup_of


class Counting(pl.Callback):
    """Bytes that this rank sends in the collectives of the second optimizer step, scalars left out."""

    def __init__(self) -> None:
        self.reduced = self.gathered = 0
        self.is_on = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.is_on = trainer.global_step == 1

    def watch(self) -> None:
        """For the rest of the process: DeepSpeed looks the functions up once."""
        all_reduce, gather = dist.all_reduce, dist.all_gather_into_tensor

        def reducing(tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            # norms, overflow flags and routing counts are small
            if self.is_on and tensor.numel() > 64:
                self.reduced += 2 * sent_in_a_ring(tensor, group)
            return all_reduce(tensor, *args, group=group, **options)

        def gathering(output_tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            if self.is_on:
                self.gathered += sent_in_a_ring(output_tensor, group)
            return gather(output_tensor, *args, group=group, **options)

        dist.all_reduce, dist.all_gather_into_tensor = reducing, gathering


def sent_in_a_ring(tensor: Any, group: Any) -> int:
    num_ranks = dist.get_world_size(group)
    return num_bytes(tensor) * (num_ranks - 1) // num_ranks


def measure(changes: dict[str, Any], counting: Counting) -> dict[str, int]:
    setup = setup_of(config(), **changes)
    options = {"name": "deepspeed", "stage": setup.stage, "ep_size": setup.ep_size}
    counting.reduced = counting.gathered = 0
    data_options = {
        "name": "reverse_text",
        "num_train_rows": 64,
        "num_validation_rows": 8,
        "sequence_length": 48,
        "batch_size": 1,
    }
    data = AfmoeDataModule(
        configure("data", data_options), load_tokenizer(None), seed=1, accumulate=setup.accumulate
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=setup.num_ranks,
        strategy=build(configure("trainer/strategy", options)).strategy,
        precision=setup.precision,  # pyright: ignore[reportArgumentType]
        max_steps=2,
        accumulate_grad_batches=setup.accumulate,
        callbacks=[counting],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        max_epochs=-1,
    )
    model = drawn_model(setup.model, trainer)
    module = AfmoeModule(
        model,
        optim=build(configure("optim", setup.optimizer)),
        scheduler=build(configure("scheduler", "constant")),
        seed=1,
    )
    trainer.fit(module, data)
    zero: Any = trainer.strategy.model.optimizer  # pyright: ignore[reportOptionalMemberAccess]
    masters = zero.fp32_partitioned_groups_flat if setup.stage == 3 else zero.single_partition_of_fp32_groups
    states = [item for state in zero.optimizer.state.values() for item in state.items()]
    weights = [getattr(one, "ds_tensor", one) for one in model.parameters()]
    return {
        "weights": num_bytes(*weights),
        "fp32 weights": num_bytes(*masters),
        "AdamW averages": num_bytes(*(value for key, value in states if key != "momentum_buffer")),
        "momentum": num_bytes(*(value for key, value in states if key == "momentum_buffer")),
        "reduced": counting.reduced,
        "gathered": counting.gathered,
    }


def main() -> None:
    setups, folder = Path(sys.argv[1]), Path(sys.argv[2])
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    counting = Counting()
    counting.watch()
    measured = [measure(changes, counting) for changes in json.loads(setups.read_text())]
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
