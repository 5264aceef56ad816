"""How numbers are stored and multiplied under DeepSpeed: as in a single process, plus fp32 copies.

    32-true      weights, gradients and their sums fp32
    bf16-mixed   the same, and products under autocast
    bf16-true    weights bf16, except those that a module keeps in fp32 (`fp32_router`); ZeRO steps on fp32
                 copies, and gradients are summed over the ranks in fp32

DeepSpeed's own bf16 mode is never on: it casts every parameter, the router's too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision


class AfmoeDeepSpeedPrecision(DeepSpeedPrecision):
    """Lightning's plugin, with autocast where that is meant, and hooks at whole optimizer steps only."""

    def __init__(self, precision: Any, stage: int) -> None:
        super().__init__(precision)
        self.stage = stage
        self.device_type = "cpu"

    def convert_input(self, data: Any) -> Any:
        return data

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.precision == "bf16-mixed":
            with torch.autocast(self.device_type, dtype=torch.bfloat16):
                yield
        else:
            yield

    def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        engine = model.trainer.model
        is_whole = engine.is_gradient_accumulation_boundary()
        if is_whole:
            self._after_closure(model, optimizer)
        engine.step()
        if is_whole and self.stage:
            # what ZeRO clipped by, infinite where it left the step out; without ZeRO the module clips
            model.gradient_norm = torch.as_tensor(engine.optimizer._global_grad_norm, device=model.device)
            # ZeRO does not call the optimizer whose hook would tell, and counts what it left out itself
            overflow = float(engine.optimizer.overflow)
            model.bad_step = model.skipped_step = torch.full((), overflow, device=model.device)
        return result

    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if not self.stage:
            super()._clip_gradients(model, optimizer, *args, **kwargs)
