"""What a person sees: the first screen, the plan of a dry run, the last screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

from afmoe.assembly import ModelSource, meta_model, training_memory_gib
from afmoe.config import RunConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.hardware import Hardware
from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.run import Run


@rank_zero_only
def show_start(
    config: RunConfig,
    run: Run,
    model: AfmoeForCausalLM,
    data: AfmoeDataModule,
    hardware: Hardware,
    trainer: pl.Trainer,
) -> None:
    """Device, model, data, length, where the run lies and how to watch it."""
    rows = _rows(config, model, data, hardware, num_ranks=trainer.world_size)
    rows["run"] = f"{_short(run.directory)}" + (
        f", continued at step {run.resume_step}" if run.resume_step else ""
    )
    if trainer.logger is not None:
        rows["watch"] = f"tensorboard --logdir {_short(run.directory / 'tensorboard')}"
    _show(f"{config.run_name}", rows)


@rank_zero_only
def show_plan(
    config: RunConfig, source: ModelSource, data: AfmoeDataModule, hardware: Hardware, trainer: pl.Trainer
) -> None:
    """What a run would do: the model on the meta device, one batch read."""
    # how many ranks there are, and how they share a step
    data.trainer = trainer
    model = meta_model(config, source, hardware)
    rows = _rows(config, model, data, hardware, num_ranks=trainer.world_size)
    needed_gib = training_memory_gib(config, source.config, hardware)
    fits = "" if needed_gib <= hardware.memory_gib else ": it does not fit"
    rows["memory"] = (
        f"at least {needed_gib:.2f} GiB for weights, gradients and optimizer states, "
        f"{'each GPU' if hardware.is_cuda else 'this machine'} has {hardware.memory_gib:.0f} GiB{fits}; "
        "scripts/plan.py says more"
    )
    if len(data.validation_split):
        # for what it would refuse
        data.val_dataloader()
    batch = next(iter(data.train_dataloader()))
    shape = "x".join(str(size) for size in batch["input_ids"].shape)
    rows["first batch"] = (
        f"{shape} tokens, {int(batch['attention_mask'].sum()):,} real; "
        f"{batch['num_label_tokens']:,} labels in the optimizer step"
    )
    _show(f"{config.run_name} (dry run: nothing was trained)", rows)


@rank_zero_only
def show_end(run: Run, trainer: pl.Trainer, values: dict[str, Any]) -> None:
    """The held-out figures and where everything lies."""
    rows = {
        name: "no finite number" if value is None else f"{value:.4f}"
        for name, value in values.items()
        if name.startswith("val/")
    }
    if values["train/loss"] is not None:
        rows["train/loss"] = f"{values['train/loss']:.4f} (mean of the last 20 steps)"
    if values["train/skipped_steps"]:
        rows["skipped"] = f"{values['train/skipped_steps']:,} steps with a NaN or an infinity"
    if values["train/tokens_per_second"] is not None:
        rows["throughput"] = (
            f"{values['train/tokens_per_second']:,.0f} real tokens per second, "
            f"{values['train/tokens']:,} in all"
        )
    for name in ("export", "checkpoints", "metrics.json", "tensorboard"):
        if (run.directory / name).exists():
            rows[name] = _short(run.directory / name)
    _show(f"finished at step {values['train/steps']}", rows)


def _rows(
    config: RunConfig,
    model: AfmoeForCausalLM,
    data: AfmoeDataModule,
    hardware: Hardware,
    *,
    num_ranks: int,
) -> dict[str, str]:
    model_config = model.config
    blocks = list(iter_moe_blocks(model))
    rows = {
        "device": _device(config, hardware, num_ranks),
        "model": (
            f"{_count(model.num_parameters())} parameters, {_count(model.num_parameters(active=True))} "
            f"active per token; {model_config.num_hidden_layers} layers, {len(blocks)} with "
            f"{model_config.num_experts} experts, top-{model_config.num_experts_per_tok}; vocabulary "
            f"{model_config.vocab_size:,}"
        ),
        "experts": f"{blocks[0].compute.description}, {_dispatch(config)}" if blocks else "none",
        "attention": config.attention["name"],
        "data": data.source.description,
    }
    report = data.report
    dropped = sum(reason["count"] for reason in report["dropped"].values())
    rows["rows"] = (
        f"{report['used']:,} for training ({report['tokens']:,} tokens, "
        f"{report['trainable_tokens']:,} learned), {report['validation']['used']:,} held out"
        + (f"; {dropped:,} dropped, see data_report.json" if dropped else "")
    )
    length = config.trainer
    limits = [f"{length.max_steps:,} steps"] if length.max_steps >= 0 else []
    limits += [] if length.max_epochs in (None, -1) else [f"{length.max_epochs} epochs"]
    limits += [] if length.max_tokens is None else [f"{length.max_tokens:,} tokens"]
    limits += [] if length.max_time is None else [length.max_time]
    packs = data.config.batch_size * length.accumulate_grad_batches * num_ranks
    ranks = f" of all {num_ranks} processes" if num_ranks > 1 else ""
    rows["length"] = (
        f"{' or '.join(limits) or 'no limit'}; a step is {packs} packs{ranks} of up to "
        f"{data.config.sequence_length} tokens"
    )
    return rows


def _dispatch(config: RunConfig) -> str:
    """What dispatch runs: with one expert rank `local`, whatever is chosen."""
    name, num_ranks = config.moe.dispatch["name"], config.trainer.strategy.get("ep_size", 1)
    if num_ranks > 1:
        return f"{name} dispatch over {num_ranks} ranks"
    return "local dispatch" + ("" if name == "local" else f" ({name} has nothing to do: one expert rank)")


def _device(config: RunConfig, hardware: Hardware, num_ranks: int) -> str:
    parts = [f"{hardware.device_type} {hardware.name}", config.trainer.precision]
    if hardware.device_type == "cpu":
        parts.insert(1, f"{torch.get_num_threads()} threads")
    if num_ranks > 1:
        parts.append(f"{num_ranks} processes")
    return ", ".join(parts)


def _show(title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3f}{unit}"
    return str(number)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
