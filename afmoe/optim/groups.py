"""Which parameters are trained, and how: the groups of an optimizer.

The groups are (dense, experts) x (decay, no_decay), in this order, and after each those of its parameters
whose rate has a factor of its own (`optim.rates`). They depend on names and shapes alone, so they are the
same on every rank, whatever part of the experts it holds. Empty ones are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from afmoe.errors import ConfigError, closest
from afmoe.optim.options import OptimOptions

_ALL_FROZEN = "no parameter is left to train: every one is frozen"
_NOT_HIDDEN = ("embed_tokens.", "lm_head.", "router.")


def parameter_groups(
    model: nn.Module,
    options: OptimOptions,
    *,
    matrices: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Trainable parameters as an optimizer's groups, each in the model's order.

    Only hidden matrices decay. `matrices` and `others` are further settings of the groups with and without
    decay (`lr` among them: before the factor). Each group carries for the log `name` and `parameter_names`,
    and `experts`: whether its parameters are of the routed experts. Raises `ConfigError` when all are frozen.
    """
    factors = [1.0, *dict.fromkeys(float(one) for one in (options.rates or {}).values() if one != 1)]
    groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
    for is_expert in (False, True):
        for decays in (True, False):
            for factor in factors:
                groups[is_expert, decays, factor] = _empty_group(
                    options, is_expert, decays, factor, (matrices if decays else others) or {}
                )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (".experts." in name, is_hidden_matrix(name, parameter), _factor(name, options))
            groups[key]["params"].append(parameter)
            groups[key]["parameter_names"].append(name)
    filled = [group for group in groups.values() if group["params"]]
    if not filled:
        raise ConfigError(_ALL_FROZEN)
    return filled


def _empty_group(
    options: OptimOptions, is_expert: bool, decays: bool, factor: float, settings: Mapping[str, Any]
) -> dict[str, Any]:
    name = f"{'experts' if is_expert else 'dense'}_{'decay' if decays else 'no_decay'}"
    return {
        **settings,
        "name": name if factor == 1 else f"{name}_x{factor}",
        "experts": is_expert,
        "lr": settings.get("lr", options.lr) * factor,
        "weight_decay": options.weight_decay if decays else 0.0,
        "params": [],
        "parameter_names": [],
    }


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether it is a matrix between hidden activations, or a stack of them: what decays, and what Muon
    moves.

    Embedding and head are not, because most of their rows get no gradient in a step; nor the router, whose
    choice decay alone would flatten; nor the biases of experts, which are stacked to rank 2.
    """
    return (
        parameter.ndim >= 2 and not any(part in name for part in _NOT_HIDDEN) and not name.endswith("_bias")
    )


def _factor(name: str, options: OptimOptions) -> float:
    for pattern, factor in (options.rates or {}).items():
        if fnmatchcase(name, pattern):
            return float(factor)
    return 1.0


def freeze_parameters(model: nn.Module, options: OptimOptions) -> None:
    """Take what `optim.freeze` names out of the training.

    To be done before a strategy wraps the model and before the optimizer is made. Raises `ConfigError` as
    `check_patterns`.
    """
    check_patterns((name for name, _ in model.named_parameters()), options)
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in options.freeze):
            parameter.requires_grad_(False)


def check_patterns(names: Iterable[str], options: OptimOptions, also_frozen: Sequence[str] = ()) -> None:
    """Raise `ConfigError` for a pattern of `optim.freeze` or `optim.rates` that does nothing, and when all is
    frozen.

    `also_frozen`: patterns of what is frozen by other means, by a callback say.
    """
    names, rates = list(names), options.rates or {}
    for key, patterns in (("freeze", options.freeze), ("rates", rates)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                # one line for all layers, and itself a pattern
                known = {re.sub(r"\.\d+\.", ".*.", name) for name in names}
                raise ConfigError(
                    f"optim.{key}: no parameter is called {pattern}; the closest: {closest(pattern, known)}"
                )
    frozen = [*options.freeze, *also_frozen]
    trained = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in frozen)]
    if not trained:
        raise ConfigError(_ALL_FROZEN)
    for number, pattern in enumerate(rates):
        left = [name for name in trained if fnmatchcase(name, pattern)]
        if not left:
            raise ConfigError(
                f"optim.rates: every parameter called {pattern} is frozen ({', '.join(frozen)}) and has no "
                "rate; take the pattern out, or train what it names"
            )
        before = list(rates)[:number]
        if all(any(fnmatchcase(name, earlier) for earlier in before) for name in left):
            raise ConfigError(
                f"optim.rates: {pattern} never counts, since patterns before it ({', '.join(before)}) match "
                "all that it does, and the first counts; put it before them"
            )


def refuse_other_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """A hook before an optimizer loads its state: raise `ConfigError` when that belongs to other groups.

    Without it the tensors of one parameter would be handed to another, or torch would say that sizes differ.
    """
    refuse_other_names([(one["name"], one["parameter_names"]) for one in optimizer.param_groups], state)


def refuse_other_names(own: list[tuple[str, list[str]]], state: Mapping[str, Any]) -> None:
    """`refuse_other_groups` for groups given by name and parameter names."""
    stored = [(group.get("name"), group.get("parameter_names")) for group in state["param_groups"]]
    if own != stored:
        raise ConfigError(
            f"the checkpoint's optimizer has the groups {_named(stored)}, this run has {_named(own)}: it was "
            "written with other settings or by an older version; start from its weights with "
            "model.pretrained=<its export>"
        )


def _named(groups: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} ({len(names or ())} parameters)" for name, names in groups)
