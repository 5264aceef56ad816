"""Runs a stored optimizer step again and says where its first NaN or infinity comes from."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from afmoe.checkpoint.pretrained import load_weights
from afmoe.config import AfmoeConfig, RunConfig
from afmoe.fault_record import Fault
from afmoe.hardware import detect_hardware
from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.module import AfmoeModule
from afmoe.optim.clipping import clip_gradients
from afmoe.optim.loss_scaling import LossScaling
from afmoe.plugins import known_names
from afmoe.registry import build, configure
from callbacks.moe_callback import MoeCallback

log = logging.getLogger(__name__)

# sums over ranks and micro-batches come in another order than in the run
_SAME_FIGURE = 1e-4


@dataclass(frozen=True)
class Replay:
    """What running the step again gave."""

    loss: float
    gradient_norm: float
    first: str | None
    """Where the first value that is no finite number appears; None: nowhere."""


def replay(fault: Fault, accelerator: str) -> Replay:
    """Forward and backward of every micro-batch of every rank, one after the other, on one device."""
    settings = OmegaConf.merge(OmegaConf.structured(RunConfig), fault.config)
    config: RunConfig = OmegaConf.to_object(settings)  # pyright: ignore[reportAssignmentType]
    is_scaled = config.trainer.precision == "16-mixed"
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        # Lightning itself would take bf16 for fp16 on a CPU
        precision=None if is_scaled else config.trainer.precision,  # pyright: ignore[reportArgumentType]
        plugins=[LossScaling(detect_hardware(accelerator).device_type)] if is_scaled else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = _make_module(fault, config, trainer, accelerator)
    watch = FirstNonFinite(module.model)
    device = trainer.strategy.root_device
    loss = torch.zeros((), device=device)
    for rank, (batches, seeds) in enumerate(zip(fault.micro_batches, fault.seeds, strict=True)):
        for number, (batch, seed) in enumerate(zip(batches, seeds, strict=True)):
            watch.place = f"micro-batch {number} of rank {rank}"
            moved = {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
            torch.manual_seed(seed)
            with trainer.precision_plugin.train_step_context():
                share = module.loss_share(moved)
            watch.look("the loss", share)
            (share * fault.loss_scale).backward()
            loss = loss + share.detach()
    # in fp32 whatever the gradients are, as the run did
    norm = float(clip_gradients(module.parameters(), None)) / fault.loss_scale
    if not math.isfinite(norm):
        watch.record("the gradient norm, of finite gradients: their squares overflow")
    return Replay(float(loss), norm, watch.first)


def is_reproduced(recorded: float, replayed: float) -> bool:
    """The same figure, or the same kind of no finite number."""
    if math.isfinite(recorded) and math.isfinite(replayed):
        return math.isclose(recorded, replayed, rel_tol=_SAME_FIGURE)
    return repr(recorded) == repr(replayed)


def _make_module(fault: Fault, config: RunConfig, trainer: pl.Trainer, accelerator: str) -> AfmoeModule:
    plugins = {"attention": config.attention, "compute": config.moe.compute, "dispatch": {"name": "local"}}
    hardware = detect_hardware(accelerator)
    model = AfmoeForCausalLM(AfmoeConfig(**fault.model_config), hardware=hardware, **plugins)
    for section in config.callbacks.values():
        if section["name"] not in known_names("callbacks"):
            log.warning("callbacks=%s is not installed here: replayed without it", section["name"])
            continue
        callback = build(configure("callbacks", section))
        if isinstance(callback, MoeCallback):
            for block in iter_moe_blocks(model):
                callback.prepare(block)
    # the optimizer's options say what is frozen and so has no part in the gradient norm
    optim = build(configure("optim", config.optim))
    scheduler = build(configure("scheduler", config.scheduler))
    module = AfmoeModule(model, optim=optim, scheduler=scheduler, seed=config.seed)
    trainer.precision_plugin.convert_module(module)
    load_weights(module.model, fault.directory)
    module.model.on_weights_updated()
    return module.to(trainer.strategy.root_device).train()


class FirstNonFinite:
    """Watches weights, outputs of modules and gradients; keeps the first that holds a NaN or an infinity."""

    def __init__(self, model: nn.Module) -> None:
        self.first: str | None = None
        self.place = "before the first batch"
        for name, tensor in model.state_dict().items():
            self.look(f"the weight {name}", tensor)
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._after_forward, name or "the model"))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._after_backward, name))

    def look(self, what: str, tensor: Tensor) -> None:
        """Record `what` if the tensor holds a value that is no finite number and nothing did before."""
        if self.first is None and tensor.is_floating_point():
            number = int((~torch.isfinite(tensor.detach())).sum())
            if number:
                self.record(f"{what}, in {number:,} of {tensor.numel():,} values")

    def record(self, what: str) -> None:
        if self.first is None:
            self.first = f"{self.place}: {what}"

    def _after_forward(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self.look(f"forward, the output of {name} ({type(module).__name__})", tensor)
            if tensor.requires_grad:
                what = f"backward, the gradient of the output of {name} ({type(module).__name__})"
                tensor.register_hook(partial(self.look, what))

    def _after_backward(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.look(f"backward, the gradient of {name}", parameter.grad)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
