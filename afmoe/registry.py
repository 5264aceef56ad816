"""Plugins by name: `register` adds one, `configure` checks a choice, `build` makes it.

A plugin is one class with one nested dataclass `Config` (its options and their checks) under one name in one
group. The group is the folder of its YAML, so `moe/compute=fp8` on the command line,
`conf/moe/compute/fp8.yaml`, `afmoe/moe/compute/fp8.py` and `Fp8Compute` are one thing. Which module holds
which name is listed in `plugins.py`; it is imported when the name is first asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from afmoe.errors import ConfigError, closest

PluginType = TypeVar("PluginType", bound=type)

_plugins: dict[str, dict[str, type]] = {}
_owners: dict[type, type] = {}


def register(group: str, name: str) -> Callable[[PluginType], PluginType]:
    """Make the decorated class the plugin `name` of `group`; the class gets both as attributes.

    Raises `ConfigError` when the class has no nested dataclass `Config` or another class holds the name.
    """

    def add(plugin: PluginType) -> PluginType:
        config = plugin.__dict__.get("Config")
        if not isinstance(config, type) or not dataclasses.is_dataclass(config):
            raise ConfigError(f"{plugin.__qualname__} needs a nested dataclass `Config` to be {group}={name}")
        taken = _plugins.setdefault(group, {}).get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (
            plugin.__module__,
            plugin.__qualname__,
        ):
            raise ConfigError(f"{group}={name} is already {taken.__module__}.{taken.__qualname__}")
        plugin.group, plugin.name = group, name
        _plugins[group][name] = plugin
        _owners[config] = plugin
        return plugin

    return add


def registered(group: str) -> Mapping[str, type]:
    """The plugins of `group` that are imported by now, by name."""
    return _plugins.get(group, {})


def find(group: str, name: str) -> type:
    """The plugin class `name` of `group`, imported if need be; `ConfigError` names the closest."""
    from afmoe.plugins import import_plugin, known_names

    import_plugin(group, name)
    plugin = _plugins.get(group, {}).get(name)
    if plugin is None:
        raise ConfigError(f"unknown {group}={name}; choose one of: {closest(name, known_names(group))}")
    return plugin


def configure(group: str, choice: Any) -> Any:
    """The checked `Config` of one plugin of `group`.

    `choice` is a plugin's name, its `Config`, or a mapping with the key `name` and options (a config group's
    section). Raises `ConfigError` for an unknown name or option and for a value that the `Config` refuses.
    """
    if isinstance(choice, str):
        choice = {"name": choice}
    if isinstance(choice, Mapping):
        options = {str(key): value for key, value in choice.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{group}: the section needs a `name`, got {dict(choice)}")
        config_type: Any = find(group, name).Config  # pyright: ignore[reportAttributeAccessIssue]
        fields = {field.name for field in dataclasses.fields(config_type)}
        for key in options.keys() - fields:
            raise ConfigError(
                f"{group}={name} has no option `{key}`; it has: {closest(key, fields) or 'none'}"
            )
        try:
            return config_type(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{group}={name}: {error}") from error
    owner = _owners.get(type(choice))
    if owner is None or owner.group != group:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(f"{group} takes a name or a plugin's Config, got {choice!r}")
    return choice


def build(config: Any, **runtime: Any) -> Any:
    """Make the plugin that `config` (a plugin's `Config`) belongs to.

    `runtime` is what only the running program knows: sizes, process groups, the tokenizer.
    """
    return plugin_of(config)(config, **runtime)


def plugin_of(config: Any) -> Any:
    """The plugin class that `config`, a plugin's `Config`, belongs to."""
    return _owners[type(config)]
