"""The folder of config groups: which groups and options there are, and what a choice of them composes to."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from afmoe import CONF_DIRECTORY

CHANGES_DEFAULTS = {"experiment", "debug"}
"""Groups whose options set values of others; null is a choice of them."""


def _choice(group: str, *, _root_: DictConfig) -> str:
    """The resolver `${choice:GROUP}`: the option that was chosen of a group.

    Hydra's own `${hydra:runtime.choices.GROUP}` fails in the name of a sweep's folder, which is needed before
    the first job's config is known to it; there the choices still stand in the config itself.
    """
    settings = _root_.get("hydra") or HydraConfig.get()
    return str(settings.runtime.choices[group])


OmegaConf.register_new_resolver("choice", _choice, replace=True)


def config_groups() -> set[str]:
    """Every config group of the recipes: the folders of `conf/` that hold options, with slashes."""
    return {
        path.parent.relative_to(CONF_DIRECTORY).as_posix()
        for path in CONF_DIRECTORY.rglob("*.yaml")
        if path.parent != CONF_DIRECTORY
    }


def group_options(group: str) -> list[str]:
    """The options of a config group: the YAML files in its folder."""
    return sorted(path.stem for path in (CONF_DIRECTORY / group).glob("*.yaml"))


def has_key(group: str, option: str, key: str) -> bool:
    """Whether the YAML of an option holds a key."""
    return key in OmegaConf.load(CONF_DIRECTORY / group / f"{option}.yaml")


def compose_defaults(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that the chosen groups give before any field is changed. Overrides of fields are passed
    over.
    """
    groups = config_groups()
    chosen = [
        override
        for override in overrides
        if override.split("=", 1)[0] in groups - CHANGES_DEFAULTS or override.startswith("hydra.searchpath=")
    ]
    state = GlobalHydra.instance()
    if not state.is_initialized():
        from hydra import compose, initialize_config_dir

        with initialize_config_dir(str(CONF_DIRECTORY), version_base="1.3"):
            return compose(config_name, chosen)
    loader = state.config_loader()
    composed = loader.load_configuration(config_name, chosen, RunMode.RUN, from_shell=False)
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra", None)
    return composed
