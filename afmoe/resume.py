"""Which settings may change when a run continues, and how a change that may not is answered."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from pathlib import Path
from typing import Any

from afmoe.config import RunConfig
from afmoe.errors import ConfigError

log = logging.getLogger(__name__)

# Length of the run, what is logged and written, and what changes where the work is done but not its result.
MAY_DIFFER = (
    "attention.*",
    "callbacks.load_balance*",
    "callbacks.early_stopping*",
    "checkpoint.*",
    "data.allow_batch_change",
    "data.batch_size",  # packs per optimizer step are compared instead, with the world size
    "data.num_workers",
    "dry_run",
    "export.*",
    "faults.*",
    "logger.*",
    "memory.*",  # the same products; compiled layers and other chunks round otherwise, as other devices do
    "model.explicit*",
    "moe.compute.compiled",  # the same products and roundings; sums in another order
    "moe.dispatch.*",
    "overwrite",
    "resume",
    "run_name",
    "samples.*",
    "trainer.accelerator",
    "trainer.accumulate_grad_batches",
    "trainer.benchmark",
    "trainer.check_val_every_n_epoch",
    "trainer.devices*",
    "trainer.enable_progress_bar",
    "trainer.limit_val_batches",
    "trainer.log_every_n_steps",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_tokens",
    "trainer.max_time",
    "trainer.num_nodes",
    "trainer.profiler",
    "trainer.strategy.*",
    "trainer.val_check_interval",
)


def refuse_changes(config: RunConfig, stored: dict[str, Any] | None, checkpoint: Path) -> None:
    """Raise `ConfigError` when a setting that decides the result differs from the checkpoint's run.

    `stored` is the content of that run's `config.yaml`; without one there is nothing to compare, which is
    said.
    """
    if stored is None:
        log.warning("%s has no config.yaml beside it: its settings cannot be compared", checkpoint)
        return
    new, old = flatten(dataclasses.asdict(config)), flatten(stored)
    changes = [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(new.keys() | old.keys())
        if new.get(key) != old.get(key) and not any(fnmatch.fnmatch(key, pattern) for pattern in MAY_DIFFER)
    ]
    if changes:
        listed = "; ".join(changes[:10]) + (f"; and {len(changes) - 10} more" if len(changes) > 10 else "")
        raise ConfigError(
            f"this run folder was made with other settings: {listed}. Take them back, choose another "
            "run_name, start anew with resume=never overwrite=true, or begin from its weights with "
            "model.pretrained=<its export>"
        )


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, `{"trainer.max_steps": 400, ...}`; lists are values."""
    if not isinstance(node, dict):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
