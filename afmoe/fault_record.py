"""What is kept of an optimizer step that stopped a run, enough to run it again (`scripts/replay_batch.py`).

    faults/step-000123/
        fault.json                        the step, its figures, the settings of run and model
        model.safetensors                 the weights, which no skipped step has changed
        micro-batches-00000.safetensors   one file a rank: `0.input_ids`, `0.labels`, ..., `1.input_ids`, ...

`fault.json` comes last: without it the directory does not count.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor

from afmoe.checkpoint.atomic import disk_errors, write_text
from afmoe.checkpoint.directory import checkpoint_name
from afmoe.checkpoint.pretrained import ModelTensors, write_model
from afmoe.config import RunConfig
from afmoe.errors import ConfigError
from afmoe.parallel.deepspeed import gathered_tensors

Batch = dict[str, Any]
_FAULT = "fault.json"


@dataclass(frozen=True)
class Fault:
    """A stored step, as it was written."""

    directory: Path
    config: dict[str, Any]
    """The run's settings, as in its `config.yaml`."""
    model_config: dict[str, Any]
    """Of the model as it was, from its preset, its checkpoint or its tokenizer."""
    step: int
    loss: float
    """Of the whole step, all ranks."""
    gradient_norm: float
    loss_scale: float
    """By which fp16 multiplies the loss before backward; 1 in other precisions."""
    micro_batches: list[list[Batch]]
    """By rank."""
    seeds: list[list[int]]


def save_fault(
    config: RunConfig, run_directory: Path, trainer: Trainer, module: Any, micro_batches: list[Batch]
) -> Path:
    """Write the running step, every rank its own batches; returns the directory."""
    directory = run_directory / "faults" / checkpoint_name(trainer.global_step)
    loss = trainer.strategy.reduce(module.step_loss.clone(), reduce_op="sum")
    tensors = {
        f"{number}.{name}": value.detach().cpu().contiguous()
        for number, batch in enumerate(micro_batches)
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    numbers = [
        {name: value for name, value in batch.items() if isinstance(value, int)} for batch in micro_batches
    ]
    seeds = [module.micro_batch_seed(trainer.global_step - 1, number) for number in range(len(micro_batches))]
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            tensors,
            directory / _batches_name(trainer.global_rank),
            # one a micro-batch
            metadata={
                "numbers": json.dumps(numbers),
                "seeds": json.dumps(seeds),
            },
        )
        gathered = gathered_tensors(trainer.strategy, module.model)
        if trainer.is_global_zero:
            write_model(gathered or ModelTensors(module.model), directory, "canonical")
        elif gathered is not None:
            gathered.take_part()
    trainer.strategy.barrier("fault")
    if trainer.is_global_zero:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        record = {
            "step": trainer.global_step,
            "world_size": trainer.world_size,
            "loss": repr(float(loss)),
            "gradient_norm": repr(float(module.gradient_norm)),
            "loss_scale": 1.0 if scaler is None else scaler.get_scale(),
            "model_config": dataclasses.asdict(module.model.config),
            "config": dataclasses.asdict(config),
        }
        write_text(directory / _FAULT, json.dumps(record, indent=2) + "\n")
    return directory


def read_fault(directory: Path) -> Fault:
    """A stored step. Raises `ConfigError` where there is none, or not a whole one."""
    path = directory / _FAULT
    if not path.is_file():
        raise ConfigError(f"{directory} holds no {_FAULT}; give a directory like RUN/faults/step-000123")
    record = json.loads(path.read_text(encoding="utf-8"))
    micro_batches: list[list[Batch]] = []
    seeds: list[list[int]] = []
    for rank in range(record["world_size"]):
        file = directory / _batches_name(rank)
        if not file.is_file():
            raise ConfigError(f"{file} is missing: the batches of rank {rank} were not written")
        numbers, rank_seeds = _metadata(file)
        tensors = load_file(file)
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            numbers[int(number)][name] = tensor
        micro_batches.append(numbers)
        seeds.append(rank_seeds)
    return Fault(
        directory=directory,
        config=record["config"],
        model_config=record["model_config"],
        step=record["step"],
        loss=float(record["loss"]),
        gradient_norm=float(record["gradient_norm"]),
        # faults of older versions have none
        loss_scale=record.get("loss_scale", 1.0),
        micro_batches=micro_batches,
        seeds=seeds,
    )


def _metadata(file: Path) -> tuple[list[Batch], list[int]]:
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    return json.loads(metadata["numbers"]), json.loads(metadata["seeds"])


def _batches_name(rank: int) -> str:
    return f"micro-batches-{rank:05d}.safetensors"
