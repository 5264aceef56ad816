"""What a plan depends on: the model's shape, the split over ranks, how numbers are stored and multiplied."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from afmoe.config import AfmoeConfig, RunConfig
from afmoe.hardware import Hardware

FP32, BF16, INDEX = 4, 2, 8
"""Bytes of a number; an index is int64."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run, as far as memory and communication see it. Sizes in tokens are of one rank."""

    model: AfmoeConfig
    batch_size: int
    """Packs per rank and micro-batch."""
    sequence_length: int
    accumulate: int = 1
    device_type: str = "cuda"
    num_ranks: int = 1
    strategy: str = "auto"
    stage: int = 0
    ep_size: int = 1
    offload_optimizer: bool = False
    overlap_comm: bool = True
    bucket_size: int = 200_000_000
    precision: str = "32-true"
    optimizer: str = "adamw"
    freeze: tuple[str, ...] = ()
    fp32_router: bool = False
    freeze_router: bool = False
    attention: str = "sdpa"
    compute: str = "native"
    kernels: str = "torch"
    """Of `compute=bf16`."""
    wgrad: str = ""
    """Operands of the weight gradients in a quantized `compute`."""
    emulates: bool = False
    """Whether a quantized `compute` computes in fp32 on rounded operands."""
    dispatch: str = "local"
    transport: str = "native"
    activation_checkpointing: str = "none"
    loss_chunk_tokens: int | None = None
    imbalance: float = 1.0
    """Rows that this rank's experts get, over their even share."""

    @classmethod
    def of(
        cls,
        run: RunConfig,
        model: AfmoeConfig,
        *,
        hardware: Hardware | None = None,
        imbalance: float = 1.0,
    ) -> Setup:
        """The setup of the run that the recipe would make of `run`, with `model` as its shape.

        `hardware` None: GPUs, except with `trainer.accelerator=cpu`, and one where `trainer.devices=auto`.
        """
        strategy, trainer, compute = run.trainer.strategy, run.trainer, run.moe.compute
        device_type = "cpu" if trainer.accelerator == "cpu" else "cuda"
        num_devices = 1
        if hardware is not None:
            device_type, num_devices = hardware.device_type, hardware.num_devices
        ep_size = strategy.get("ep_size", 1)
        emulate = str(compute.get("emulate", "false")).lower()
        num_ranks = _num_devices(trainer.devices, num_devices) * trainer.num_nodes
        return cls(
            model=model,
            batch_size=run.data["batch_size"],
            sequence_length=run.data["sequence_length"],
            accumulate=trainer.accumulate_grad_batches,
            device_type=device_type,
            num_ranks=num_ranks,
            # Lightning's own choice for several devices
            strategy="ddp" if strategy["name"] == "auto" and num_ranks > 1 else strategy["name"],
            stage=strategy.get("stage", 0),
            ep_size=ep_size,
            offload_optimizer=strategy.get("offload_optimizer", False),
            overlap_comm=strategy.get("overlap_comm", True),
            bucket_size=strategy.get("bucket_size", cls.bucket_size),
            precision=trainer.precision,
            optimizer=run.optim["name"],
            freeze=tuple(run.optim.get("freeze", ())),
            fp32_router="fp32_router" in run.callbacks,
            freeze_router="freeze_router" in run.callbacks,
            attention=run.attention["name"],
            compute=compute["name"],
            kernels=compute.get("kernels", "torch"),
            wgrad=compute.get("wgrad", ""),
            emulates=emulate == "true" or (emulate == "auto" and device_type == "cpu"),
            # one expert rank has nobody to send to
            dispatch=run.moe.dispatch["name"] if ep_size > 1 else "local",
            transport=run.moe.dispatch.get("transport", "native"),
            activation_checkpointing=run.memory.activation_checkpointing,
            loss_chunk_tokens=run.memory.loss_chunk_tokens,
            imbalance=imbalance,
        )

    def but(self, **changes: Any) -> Setup:
        """The same with other values."""
        return dataclasses.replace(self, **changes)

    @property
    def num_tokens(self) -> int:
        """T: tokens of a rank's micro-batch."""
        return self.batch_size * self.sequence_length

    @property
    def num_copies(self) -> int:
        """N: routed copies of them."""
        return self.num_tokens * self.model.num_experts_per_tok

    @property
    def num_rows(self) -> int:
        """R: rows that this rank's experts get; as many as it sends, times the imbalance."""
        return round(self.num_copies * self.imbalance) if self.ep_size > 1 else self.num_copies

    @property
    def num_local_experts(self) -> int:
        """L"""
        return self.model.num_experts // self.ep_size

    @property
    def num_moe_layers(self) -> int:
        return max(self.model.num_hidden_layers - self.model.num_dense_layers, 0)

    @property
    def weight_bytes(self) -> int:
        """Of a stored weight; routers under `fp32_router` apart."""
        return BF16 if self.precision == "bf16-true" else FP32

    @property
    def hidden_bytes(self) -> int:
        """Of a number between the layers (h)."""
        return BF16 if self.precision == "bf16-true" else FP32

    @property
    def product_bytes(self) -> int:
        """Of an operand and a result of a product (p)."""
        return FP32 if self.precision == "32-true" else BF16

    @property
    def is_autocast(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def zero_stage(self) -> int:
        """0 where nothing is sharded: without DeepSpeed, too."""
        return self.stage if self.strategy == "deepspeed" else 0

    @property
    def num_expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.num_ranks // self.ep_size


def _num_devices(devices: Any, if_auto: int) -> int:
    if isinstance(devices, list):
        return len(devices)
    return if_auto if devices == "auto" else int(devices)
