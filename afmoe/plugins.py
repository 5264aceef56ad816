"""The visible list of our plugins, and the way in for those of other packages.

A name maps to the module whose import registers it, so nothing heavy is loaded before it is chosen. Another
package adds plugins with an entry point in the group `afmoe.plugins` that names a module whose import
registers them, and a YAML for each on `hydra.searchpath`.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.metadata import entry_points

from afmoe.registry import registered

log = logging.getLogger(__name__)

PLUGINS: dict[str, dict[str, str]] = {
    "attention": {
        "flash": "afmoe.attention.flash",
        "flex": "afmoe.attention.flex",
        "reference": "afmoe.attention.reference",
        "sdpa": "afmoe.attention.sdpa",
    },
    "moe/compute": {
        "reference": "afmoe.moe.compute.reference",
        "native": "afmoe.moe.compute.native",
        "bf16": "afmoe.moe.compute.bf16",
        "fp8": "afmoe.moe.compute.fp8",
        "mxfp8": "afmoe.moe.compute.mxfp8",
        "deepgemm_fp8": "afmoe.moe.compute.deepgemm_fp8",
    },
    "moe/dispatch": {
        "all_to_all": "afmoe.moe.dispatch.all_to_all",
        "deepep": "afmoe.moe.dispatch.deepep",
        "local": "afmoe.moe.dispatch.local",
    },
    "data": {
        "jsonl": "afmoe.data.jsonl",
        "reverse_text": "afmoe.data.reverse_text",
    },
    "optim": {
        "adamw": "afmoe.optim.adamw",
        "muon": "afmoe.optim.muon",
    },
    "scheduler": {
        "constant": "afmoe.optim.schedules.constant",
        "cosine": "afmoe.optim.schedules.cosine",
        "linear": "afmoe.optim.schedules.linear",
        "wsd": "afmoe.optim.schedules.wsd",
    },
    "trainer/strategy": {
        "auto": "afmoe.parallel.auto",
        "ddp": "afmoe.parallel.ddp",
        "deepspeed": "afmoe.parallel.deepspeed",
    },
    "logger": {
        "tensorboard": "afmoe.logger.tensorboard",
    },
    "callbacks": {
        "balanced_routing": "callbacks.balanced_routing",
        "early_stopping": "callbacks.early_stopping",
        "fp32_router": "callbacks.fp32_router",
        "freeze_router": "callbacks.freeze_router",
        "load_balance": "callbacks.load_balance",
        "selection_bias": "callbacks.selection_bias",
    },
}


def import_plugin(group: str, name: str) -> None:
    """Import the module that registers `name`: ours by the list above, any other by entry point."""
    module = PLUGINS.get(group, {}).get(name)
    if module is not None:
        importlib.import_module(module)
    elif name not in registered(group):
        import_outside_plugins()


def known_names(group: str) -> set[str]:
    """Every name that `group` offers, ours and those of outside packages."""
    import_outside_plugins()
    return {*PLUGINS.get(group, {}), *registered(group)}


@cache
def import_outside_plugins() -> None:
    """Import each entry point of the group `afmoe.plugins`, once. A broken package warns and stops nobody
    else.
    """
    for entry_point in entry_points(group="afmoe.plugins"):
        try:
            entry_point.load()
        # any exception: the import runs another package's code, and its faults must not stop a run that needs
        # none of it
        except (Exception, SystemExit) as error:
            log.warning(
                "outside plugin %s (%s) failed to import: %s", entry_point.name, entry_point.value, error
            )
