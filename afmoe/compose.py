"""From the command line to a typed `RunConfig`, and the checks that need no torch.

Hydra composes the groups; this module refuses what Hydra would accept silently (a group typed with dots, a
section replaced by a value, a value of another type than the YAML's default) and hands the recipe plain
dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from afmoe import CONF_DIRECTORY
from afmoe.checkpoint.directory import remove_if_empty
from afmoe.conf_tree import CHANGES_DEFAULTS, compose_defaults, config_groups, group_options
from afmoe.config import AfmoeConfig, RunConfig
from afmoe.errors import (
    ConfigError,
    UserError,
    closest,
    explain_hydra,
    full_traces_wanted,
    one_line_errors,
    show,
)


def recipe(config_name: str) -> Callable[[Callable[[RunConfig], Any]], Callable[[], Any]]:
    """Make a function of a `RunConfig` the program behind `conf/<config_name>.yaml`.

    The result parses the command line with Hydra, checks it, calls the function (once a job under `-m`) and
    shows mistakes as one line.
    """

    def decorate(function: Callable[[RunConfig], Any]) -> Callable[[], Any]:
        @functools.wraps(function)
        def task(cfg: DictConfig) -> Any:
            try:
                return function(typed_config(cfg))
            except (UserError, MemoryError) as error:
                # a sweep goes on with its other jobs and fails at its end; a single run ends here, with one
                # line only
                if HydraConfig.get().mode == RunMode.MULTIRUN or full_traces_wanted():
                    raise
                show(error)
                raise SystemExit(1) from None
            finally:
                # Hydra makes the run folder before anything is known about the run
                remove_if_empty(Path(HydraConfig.get().runtime.output_dir))

        def program() -> Any:
            # Before torch loads OpenMP, which reads them then: threads that spin for long while they wait
            # take the cores from whatever else runs (experiment=smoke, 2 cores at load 5: 128 s spinning,
            # 20 s passive), and threads that sleep at once wake late (120 steps of the main job, 2 quiet
            # cores: 35 s, with a short spin 25 s).
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            os.environ.setdefault("GOMP_SPINCOUNT", "20000")
            with one_line_errors(config_name):
                run = hydra.main(version_base="1.3", config_path=str(CONF_DIRECTORY), config_name=config_name)
                return run(task)()

        return program

    return decorate


def typed_config(cfg: DictConfig) -> RunConfig:
    """Check a composed config against its defaults and turn it into dataclasses. Raises `ConfigError`."""
    settings = HydraConfig.get()
    choices = {
        key: value for key, value in settings.runtime.choices.items() if not str(key).startswith("hydra/")
    }
    overrides = [str(override) for override in settings.overrides.task]
    OmegaConf.resolve(cfg)
    for group, choice in choices.items():
        if choice is None and group not in CHANGES_DEFAULTS:
            options = ", ".join(group_options(str(group)))
            raise ConfigError(f"{group} needs an option, got null; choose one of: {options}")
    # Hydra's list of choices leaves out the groups of which several options may be chosen
    chosen = cfg.get("callbacks")
    choices["callbacks"] = list(chosen) if isinstance(chosen, DictConfig) else []
    config_name = str(settings.job.config_name)
    try:
        _compare("", cfg, compose_defaults(config_name, _as_overrides(choices)))
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_hydra(error, config_name)) from error
    typed.model.explicit = explicit_model_fields(overrides, str(choices.get("experiment")))
    layers, dense = typed.model.num_hidden_layers, typed.model.num_dense_layers
    if dense >= layers and "num_dense_layers" not in typed.model.explicit:
        # a preset that is made shallower stays a mixture of experts
        typed.model.num_dense_layers = max(layers - 1, 0)
    return OmegaConf.to_object(typed)  # pyright: ignore[reportReturnType]


def explicit_model_fields(overrides: Sequence[str], experiment: str) -> list[str]:
    """The fields of `model` that the person set: on the command line or in the chosen experiment's file."""
    keys = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    names = {key.removeprefix("model.") for key in keys if key.startswith("model.")}
    path = CONF_DIRECTORY / "experiment" / f"{experiment}.yaml"
    if path.is_file():
        section = OmegaConf.select(OmegaConf.load(path), "model")
        names |= {str(key) for key in section} if isinstance(section, DictConfig) else set()
    known = {field.name for field in dataclasses.fields(AfmoeConfig)}
    return sorted(names & known)


def _as_overrides(choices: dict[Any, Any]) -> list[str]:
    def text(value: Any) -> str:
        if isinstance(value, list | ListConfig):
            return f"[{','.join(str(item) for item in value)}]"
        return "null" if value is None else str(value)

    chosen = [f"{group}={text(value)}" for group, value in choices.items()]
    searchpath = HydraConfig.get().searchpath
    return chosen if not searchpath else [*chosen, f"hydra.searchpath={text(list(searchpath))}"]


# values that Lightning takes as a number, a share or a word; `TrainerConfig` judges them
_OF_SEVERAL_TYPES = ("trainer.devices", "trainer.val_check_interval", "trainer.overfit_batches")


def _compare(path: str, node: Any, default: Any) -> None:
    """Refuse what differs from the defaults in kind: an unknown key, a replaced section, a value of another
    type.
    """
    if isinstance(default, DictConfig):
        if not isinstance(node, DictConfig):
            raise ConfigError(_replaced_section(path, node, default))
        for key in default:
            if key not in node:
                inner = f"{path}.{key}" if path else str(key)
                raise ConfigError(f"~{inner}: a key cannot be taken away; give it a value, or null")
        for key in node:
            inner = f"{path}.{key}" if path else str(key)
            if key not in default:
                raise ConfigError(f"unknown key {inner}; the closest: {closest(str(key), map(str, default))}")
            # a `null` default takes any type, and interpolations of the defaults are resolved in the config
            # itself
            if not OmegaConf.is_interpolation(default, str(key)) and default[key] is not None:
                _compare(inner, node[key], default[key])
    elif path.endswith(".name") and node != default:
        group = path.removesuffix(".name").replace(".", "/")
        raise ConfigError(f"{path}={_text(node)}: choose the group, {group}={_text(node)}")
    elif node is not None and path not in _OF_SEVERAL_TYPES and not _same_type(node, default):
        raise ConfigError(f"{path} takes {_type_name(default)}, got {_text(node)}")


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, str):
        return isinstance(value, str | int | float)
    if isinstance(default, ListConfig):
        return isinstance(value, ListConfig)
    return True


def _type_name(default: Any) -> str:
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        ListConfig: "a list",
    }
    return f"{kinds.get(type(default), type(default).__name__)} (default {_text(default)})"


def _text(value: Any) -> str:
    return str(OmegaConf.to_container(value)) if OmegaConf.is_config(value) else str(value)


def _replaced_section(path: str, value: Any, default: DictConfig) -> str:
    group = path.replace(".", "/")
    if group in config_groups():
        return (
            f"{path}={_text(value)} would replace the whole section; choose the group with a slash: "
            f"{group}={_text(value)}"
        )
    return f"{path} is a section, got {_text(value)}; its keys: {closest('', map(str, default))}"
