"""Train a tiny model as one rank of several, or alone, and write down what came of it.

    worker.py CASES.json FOLDER

CASES.json lists `Case`s; rank 0 writes FOLDER/NAME.pt for each: `losses`, `norms`, `gradients` of the first
step, `weights`, and every rank FOLDER/NAME.rank-N.pt, its own `weights` and `made`, the shapes of those that
its model was made with.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from afmoe.checkpoint.deferred import DeferredTensor
from afmoe.checkpoint.lightning_io import RunCheckpointIO
from afmoe.checkpoint.run import write_checkpoint
from afmoe.config import AfmoeConfig
from afmoe.config.run import MemoryConfig
from afmoe.data.datamodule import AfmoeDataModule
from afmoe.data.tokenizer import load_tokenizer
from afmoe.memory import use_memory_settings
from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.module import AfmoeModule
from afmoe.moe.block import hold_experts
from afmoe.optim.options import OptimOptions
from afmoe.parallel.deepspeed import rank_experts
from afmoe.registry import build, configure


@dataclass
class Case:
    name: str
    world_size: int = 1
    """1 runs in the calling process, without DeepSpeed unless `strategy` asks for it."""
    strategy: dict[str, Any] | None = None
    """Options of `trainer/strategy=deepspeed`; None: a plain process."""
    batch_size: int = 1
    """Packs a rank and micro-batch."""
    accumulate: int = 1
    optimizer: str = "adamw"
    precision: str = "32-true"
    fp32_router: bool = False
    freeze: list[str] = field(default_factory=list)
    tied: bool = False
    checkpointing: str = "none"
    starved: bool = True
    """The experts of the last half get no token in the first MoE layer."""
    steps: int = 4
    max_steps: int = 4
    """Length that the schedule is made for."""
    poisoned_step: int | None = None
    """The last rank's expert gradients are NaN in this step."""
    infinite_loss_step: int | None = None
    """The last rank's loss is infinite in this step, its gradients are not."""
    resume_from: str | None = None
    save_to: str | None = None
    """Beside it, under `whole`, the same checkpoint is written from a state that rank 0 holds whole."""
    dies_at_save: bool = False
    """The last rank, in the middle."""
    large: bool = False
    """412 MiB of state; a tensor of stacked experts has 4 MiB."""


class Sgd:
    """Plain steps: what reaches the optimizer is what changes the weights."""

    @dataclass(kw_only=True)
    class Config(OptimOptions):
        lr: float = 0.1
        gradient_clip: float | None = 0.5

    def __init__(self, config: Config) -> None:
        self.config = config

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        from afmoe.optim.groups import parameter_groups

        return torch.optim.SGD(parameter_groups(model, self.config), lr=self.config.lr, fused=True)


class StopAndSave(Checkpoint):
    """Ends the run at a step before the one that its schedule is made for; the last of the callbacks."""

    def __init__(self, steps: int, save_to: str | None) -> None:
        self.steps, self.save_to = steps, save_to
        self.memory_growth = 0
        """Bytes, at most, while the checkpoint was written."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.steps and not trainer.should_stop:
            trainer.should_stop = True
            if self.save_to is not None:
                self._save(trainer, Path(self.save_to))

    def _save(self, trainer: Any, path: Path) -> None:
        # the peak of the resident set is counted anew
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        trainer.save_checkpoint(path, weights_only=False)
        self.memory_growth = resident_bytes("VmHWM") - before
        whole = all_made(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        if trainer.is_global_zero:
            write_checkpoint(path.parent / "whole" / path.name, whole)


def resident_bytes(name: str) -> int:
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def all_made(state: Any) -> Any:
    """A state without deferred tensors. Every rank has to take part."""
    # weights are tied by being one object
    done: dict[int, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, DeferredTensor):
            if id(value) not in done:
                done[id(value)] = value.make().clone()
            return done[id(value)]
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(state)


class Die(pl.Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            states = checkpoint["optimizer_states"][0]["state"]
            states[len(states) // 2]["exp_avg"] = DeferredTensor((), torch.float32, lambda: os._exit(3))


class Poison(pl.Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank != trainer.world_size - 1:
            return
        for block in iter_moe_blocks(pl_module):
            block.experts.up_proj.register_hook(
                lambda gradient: gradient * float("nan") if trainer.global_step == self.step else gradient
            )


class InfiniteLoss(pl.Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def add_infinity(model: Any, args: Any, output: Any) -> None:
            if trainer.global_step == self.step:
                output.loss_sum = output.loss_sum + float("inf")

        if trainer.global_rank == trainer.world_size - 1:
            pl_module.model.register_forward_hook(add_infinity)


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[float | None] = []
        self.gradients: dict[str, Tensor] = {}
        self.gradient_dtypes: dict[str, str] = {}
        self.counts: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            self.gradients = {
                name: whole(trainer.strategy, parameter, gradient(parameter))
                for name, parameter in pl_module.model.named_parameters()
                if parameter.requires_grad
            }

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.is_step_end(batch_idx):
            return
        self.losses.append(float(trainer.strategy.reduce(pl_module.step_loss.clone(), reduce_op="sum")))
        self.norms.append(float(pl_module.gradient_norm))
        skipped = pl_module.skipped_step
        self.skipped.append(None if skipped is None else float(skipped))
        counts_LE = torch.stack([block.statistics.counts_E for block in iter_moe_blocks(pl_module)])
        self.counts.append(trainer.strategy.reduce(counts_LE.clone(), reduce_op="sum"))


def gradient(parameter: Any) -> Tensor:
    """Summed over the ranks, before clipping."""
    if "deepspeed" not in sys.modules:
        return parameter.grad.detach().clone()
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter).detach().clone()


def whole(strategy: Any, parameter: Any, value: Tensor) -> Tensor:
    ranks = getattr(strategy, "expert_ranks", None)
    return ranks.gather(value) if ranks is not None and not getattr(parameter, "allreduce", True) else value


def tiny_config(case: Case, vocab_size: int) -> AfmoeConfig:
    return AfmoeConfig(
        vocab_size=vocab_size,
        hidden_size=256 if case.large else 32,
        intermediate_size=64,
        moe_intermediate_size=512 if case.large else 16,
        num_hidden_layers=11 if case.large else 3,
        num_dense_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
        sliding_window=16,
        global_attn_every_n_layers=3,
        tie_word_embeddings=case.tied,
        initializer_range=0.1,
    )


def drawn_model(config: AfmoeConfig, trainer: pl.Trainer) -> AfmoeForCausalLM:
    """As `afmoe.assembly.make_model` draws one."""
    with torch.device("meta"):
        model = AfmoeForCausalLM(config, compute="reference", dispatch="all_to_all")
    hold_experts(model, rank_experts(trainer.strategy, config.num_experts))
    model.to_empty(device="cpu").init_weights()
    return model


def run(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train; what rank 0 writes, and what each rank writes."""
    tokenizer = load_tokenizer(None)
    strategy: Any = "auto"
    if case.strategy is not None:
        strategy = build(configure("trainer/strategy", {"name": "deepspeed", **case.strategy})).strategy
    watch = Watch()
    stop = StopAndSave(case.steps, case.save_to)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=case.world_size,
        strategy=strategy,
        precision=case.precision,  # pyright: ignore[reportArgumentType]
        max_steps=case.max_steps,
        min_steps=0,
        accumulate_grad_batches=case.accumulate,
        callbacks=[
            watch,
            Poison(case.poisoned_step),
            InfiniteLoss(case.infinite_loss_step),
            *[Die()] * case.dies_at_save,
            stop,
        ],
        plugins=[RunCheckpointIO()],
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,
    )
    torch.manual_seed(0)
    model = drawn_model(tiny_config(case, len(tokenizer)), trainer)
    blocks = list(iter_moe_blocks(model))
    for index, block in enumerate(blocks):
        # not zero: it has to survive a checkpoint
        block.router.selection_bias.copy_(torch.linspace(0, 0.05 * index, 8))
        if case.fp32_router:
            block.router.fp32 = True
    if case.starved:
        blocks[0].router.selection_bias[4:] = -10.0
    use_memory_settings(model, MemoryConfig(activation_checkpointing=case.checkpointing))
    optim: Any
    if case.optimizer == "sgd":
        optim = Sgd(Sgd.Config(freeze=case.freeze))
    else:
        # bf16 would hide what several ranks do differently
        fp32 = {"newton_schulz_dtype": "float32"} if case.optimizer == "muon" else {}
        options = {"name": case.optimizer, "lr": 1e-3, "freeze": case.freeze, **fp32}
        optim = build(configure("optim", options))
        optim.config.gradient_clip = 0.5
    data = AfmoeDataModule(
        configure(
            "data",
            {
                "name": "reverse_text",
                "num_train_rows": 64,
                "num_validation_rows": 8,
                "sequence_length": 48,
                "batch_size": case.batch_size,
            },
        ),
        tokenizer,
        seed=1,
        accumulate=case.accumulate,
    )
    scheduler = build(configure("scheduler", {"name": "linear", "warmup_steps": 2}))
    module = AfmoeModule(model, optim=optim, scheduler=scheduler, seed=1)
    made = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    trainer.fit(module, data, ckpt_path=case.resume_from)
    local = {name: value.detach().clone() for name, value in model.state_dict().items()}
    weights = all_made(dict(trainer.strategy.lightning_module_state_dict()))
    result = {
        "losses": watch.losses,
        "skipped": watch.skipped,
        "norms": watch.norms,
        "gradients": watch.gradients,
        "counts": watch.counts,
        "weights": {name.removeprefix("model."): value for name, value in weights.items()},
        "dtypes": {name: str(value.dtype) for name, value in model.state_dict().items()},
    }
    return result, {"weights": local, "made": made, "memory_growth": stop.memory_growth}


def main() -> None:
    cases, folder = Path(sys.argv[1]), Path(sys.argv[2])
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    for values in json.loads(cases.read_text()):
        case = Case(**values)
        result, local = run(case)
        rank = torch.distributed.get_rank()
        torch.save(local, folder / f"{case.name}.rank-{rank}.pt")
        if rank == 0:
            torch.save(result, folder / f"{case.name}.pt")


def write_cases(path: Path, cases: list[Case]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))


if __name__ == "__main__":
    main()
