"""Whether a run folder holds a run that has reached its length, by the settings of the one that asks."""

from __future__ import annotations

from typing import Any

from afmoe.config import RunConfig
from afmoe.config.trainer import seconds_of


def is_finished(config: RunConfig, metrics: dict[str, Any], stored: dict[str, Any] | None, step: int) -> bool:
    """`metrics` is the content of `metrics.json`, `stored` that of `config.yaml`, `step` what is done.

    A run that ended at one limit goes on when that limit is raised or taken away, and no other is reached.
    """
    if metrics.get("status") != "finished":
        return False
    limits, stopped_by = config.trainer, metrics.get("stopped_by")
    if limits.max_steps != -1 and step >= limits.max_steps:
        return True
    if limits.max_tokens is not None and metrics["train/tokens"] >= limits.max_tokens:
        return True
    before = stored or {}
    if stopped_by == "max_epochs":
        return _at_most(limits.max_epochs, before["trainer"]["max_epochs"])
    if stopped_by == "max_time":
        return limits.max_time is not None and seconds_of(limits.max_time) <= seconds_of(
            before["trainer"]["max_time"]
        )
    if stopped_by == "early_stopping":
        return config.callbacks.get("early_stopping") == before["callbacks"]["early_stopping"]
    return False


def _at_most(limit: int | None, reached: int) -> bool:
    return limit is not None and limit != -1 and limit <= reached
