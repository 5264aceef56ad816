"""Says at the start which parameters are trained, how, and which are not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from afmoe.parallel.deepspeed import gathered_tensors

_NAMES_SHOWN = 4


class ParameterGroups(Callback):
    """One line for each group of the optimizer, with its peak rate, and one for what is frozen."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        parameters: dict[str, Tensor] = dict(pl_module.model.named_parameters())
        # of the whole model, where a rank holds a share
        shared = gathered_tensors(trainer.strategy, pl_module.model)
        whole = parameters if shared is None else shared.specs
        for group in trainer.optimizers[0].param_groups:
            held = [whole[name] for name in group["parameter_names"]]
            # an optimizer of an outside package need not name one
            rule = group.get("rule", type(trainer.optimizers[0]).__name__)
            rank_zero_info(
                f"{group['name']}: {_size(held)}, {rule}, learning rate {group['initial_lr']:g}, "
                f"weight decay {group['weight_decay']:g}"
            )
        frozen = {name: whole[name] for name, one in parameters.items() if not one.requires_grad}
        if frozen:
            rank_zero_info(f"frozen: {_size(frozen.values())}: {_kinds(frozen)}")


def _size(parameters: Iterable[Tensor]) -> str:
    sizes = [parameter.numel() for parameter in parameters]
    return f"{len(sizes)} tensor{'s' if len(sizes) > 1 else ''}, {sum(sizes):,} values"


def _kinds(names: Iterable[str]) -> str:
    """Names with the layers' numbers left out, the first of them."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    more = len(kinds) - _NAMES_SHOWN
    return ", ".join(kinds[:_NAMES_SHOWN]) + (f", and {more} more kinds" if more > 0 else "")
