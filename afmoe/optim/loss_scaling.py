"""`trainer.precision=16-mixed`: products in fp16, and a loss scaled up so that small gradients survive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision


class LossScaling(MixedPrecision):
    """Lightning's fp16 autocast with `torch.amp.GradScaler`, on GPUs and CPUs alike.

    Two differences from Lightning: it would turn fp16 into bf16 on a CPU; and it leaves unscaling to
    optimizers that can do it, like the fused AdamW, so that gradients would be measured and clipped scaled.
    Here they are unscaled first, always. A step whose gradients overflow is skipped by the optimizer itself
    (`found_inf`), without waiting for the device, and halves the scale, as does one whose loss is no finite
    number; 2,000 good steps in a row double it.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__("16-mixed", device_type, torch.amp.GradScaler(device_type))

    def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        closure()
        assert self.scaler is not None
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        bad_step = getattr(optimizer, "found_inf", None)
        if bad_step is not None:
            # the scaler knows gradients only and would take the place of the flag of a loss that is no number
            for flag in self.scaler._found_inf_per_device(optimizer).values():
                flag.copy_(torch.maximum(flag, bad_step.to(flag.device)))
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result
