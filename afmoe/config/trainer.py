"""The group `trainer`: Lightning's own names, and their bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from afmoe.config.checks import at_least, one_of, share_or_number
from afmoe.errors import ConfigError


@dataclass(kw_only=True)
class TrainerConfig:
    """Lightning's own names and meanings (`lightning.Trainer`), except what has a group or key of its own
    here.
    """

    strategy: dict[str, Any] = field(default_factory=dict)
    accelerator: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: str = "32-true"
    max_steps: int = -1
    max_epochs: int | None = None
    max_tokens: int | None = None
    """Real tokens of all ranks; ours, not Lightning's."""
    max_time: str | None = None
    accumulate_grad_batches: int = 1
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    overfit_batches: Any = 0.0
    log_every_n_steps: int = 10
    enable_progress_bar: bool = True
    deterministic: bool = False
    benchmark: bool | None = None
    detect_anomaly: bool = False
    profiler: str | None = None

    def __post_init__(self) -> None:
        at_least("trainer.num_nodes", self.num_nodes, 1)
        at_least("trainer.accumulate_grad_batches", self.accumulate_grad_batches, 1)
        at_least("trainer.log_every_n_steps", self.log_every_n_steps, 1)
        self._check_devices()
        share_or_number("trainer.val_check_interval", self.val_check_interval, zero=False)
        share_or_number("trainer.limit_train_batches", self.limit_train_batches, zero=False)
        share_or_number("trainer.limit_val_batches", self.limit_val_batches)
        if self.overfit_batches is None:
            raise ConfigError("trainer.overfit_batches takes a number or a share of the batches, got null")
        share_or_number("trainer.overfit_batches", self.overfit_batches)
        self._check_whole_steps()
        if self.check_val_every_n_epoch is not None:
            at_least("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch, 1)
        if self.max_time is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(self.max_time)):
            raise ConfigError(f"trainer.max_time is written DD:HH:MM:SS, got {self.max_time}")
        if self.max_time is not None and not seconds_of(self.max_time):
            raise ConfigError(
                f"trainer.max_time must be longer than {self.max_time}; trainer.max_steps=0 trains nothing, "
                "null sets no limit"
            )
        if self.max_tokens is not None:
            self._check_max_tokens(self.max_tokens)
        one_of("trainer.profiler", self.profiler, (None, "simple", "advanced", "pytorch"))
        at_least("trainer.max_steps", self.max_steps, -1)
        one_of("trainer.precision", self.precision, PRECISIONS)
        if self.max_epochs is not None:
            at_least("trainer.max_epochs", self.max_epochs, -1)

    def _check_devices(self) -> None:
        devices = self.devices
        is_number = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1
        if devices != "auto" and not is_number and not (isinstance(devices, list) and devices):
            raise ConfigError(
                f"trainer.devices takes auto, a number from 1 or a list of numbers, got {devices}"
            )
        if isinstance(devices, list) and not all(isinstance(index, int) and index >= 0 for index in devices):
            raise ConfigError(f"trainer.devices lists device numbers from 0, got {devices}")

    def _check_max_tokens(self, max_tokens: int) -> None:
        at_least("trainer.max_tokens", max_tokens, 1)
        if self.overfit_batches or self.limit_train_batches not in (None, 1.0):
            raise ConfigError(
                f"trainer.max_tokens={max_tokens} counts the tokens of whole epochs; it does not go with "
                "trainer.limit_train_batches or trainer.overfit_batches, use trainer.max_steps there"
            )

    def _check_whole_steps(self) -> None:
        """Lightning steps at the end of a cut epoch although micro-batches are missing."""
        for name in ("limit_train_batches", "overfit_batches"):
            value = getattr(self, name)
            if self.accumulate_grad_batches == 1 or value in (None, 0, 1.0):
                continue
            if isinstance(value, float) or value % self.accumulate_grad_batches:
                raise ConfigError(
                    f"trainer.{name} must be a multiple of trainer.accumulate_grad_batches="
                    f"{self.accumulate_grad_batches}, so that optimizer steps are whole, got {value}"
                )


def seconds_of(duration: str) -> int:
    """Seconds of `DD:HH:MM:SS`, as `trainer.max_time` is written."""
    days, hours, minutes, seconds = map(int, duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
