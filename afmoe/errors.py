"""Mistakes that a person can mend, and how they are shown: one line, exit code 1, no trace.

Everything here imports hydra and omegaconf only, so that a misspelt option is answered before torch is
loaded. `HYDRA_FULL_ERROR=1` shows the trace behind the line.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# Hydra reads the variable at the moment an exception passes; `one_line_errors` sets it for itself and keeps
# the person's own wish under this name, which the processes of further ranks inherit.
_WISH = "AFMOE_FULL_ERROR"


class UserError(Exception):
    """What the person at the keyboard can mend. The message says what, the value, the bound, the remedy."""


class ConfigError(UserError, ValueError):
    """A wrong choice, field or value in the configuration, in a checkpoint's config or in the data."""


class MachineError(UserError, RuntimeError):
    """This machine cannot do what was asked: hardware, library, disk, or another process in the way."""


def closest(name: str, valid: Iterable[str], limit: int = 10) -> str:
    """The valid names, those most like `name` first, at most `limit` of them, as one comma-separated text."""
    names = sorted(valid)
    # cutoff 0 ranks all of them: a name that resembles nothing still gets a list to choose from
    ranked = difflib.get_close_matches(name, names, n=limit, cutoff=0.0)
    text = ", ".join(ranked)
    return text if len(names) <= limit else f"{text}, ... ({len(names)} in all)"


def full_traces_wanted() -> bool:
    return os.environ.get(_WISH) == "1"


def show(error: BaseException) -> None:
    """Write the error as one line to standard error."""
    line = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {line}", file=sys.stderr, flush=True)


@contextmanager
def one_line_errors(config_name: str) -> Iterator[None]:
    """Turn mistakes that pass through, ours, Hydra's and OmegaConf's, into one line and exit code 1.

    Faults of the program itself pass unchanged, with their trace.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    before = {name: os.environ.get(name) for name in ("HYDRA_FULL_ERROR", _WISH)}
    os.environ.setdefault(_WISH, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except UserError as error:
        if full_traces_wanted():
            raise
        show(error)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        if full_traces_wanted():
            raise
        show(UserError("interrupted"))
        raise SystemExit(130) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # of plain value errors only the one that Hydra raises for `group=5` is the person's
        is_mistake = isinstance(error, HydraException | OmegaConfBaseException) or "group override" in str(
            error
        )
        if full_traces_wanted() or not is_mistake:
            raise
        show(ConfigError(explain_hydra(error, config_name)))
        raise SystemExit(1) from None
    except OSError as error:
        # a folder that cannot be made or written; inside a run such faults are named where they happen
        if full_traces_wanted() or error.filename is None:
            raise
        show(
            MachineError(
                f"{error.strerror}: {error.filename}; choose another folder, e.g. hydra.run.dir=PATH"
            )
        )
        raise SystemExit(1) from None
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def script_errors(exit_code: int = 1) -> Iterator[None]:
    """`one_line_errors` for a program that reads its options without Hydra."""
    try:
        yield
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        show(error)
        raise SystemExit(exit_code) from None


class ScriptParser(argparse.ArgumentParser):
    """Mistakes in the options end like all others, in one line, when read in `script_errors`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def explain_hydra(error: Exception, config_name: str) -> str:
    """Hydra's or OmegaConf's message as one line that also offers the closest valid names."""
    from afmoe.conf_tree import group_options

    text = str(error)
    missing = re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text)
    if missing and group_options(missing[1]):
        group, name = missing.groups()
        return f"unknown {group}={name}; choose one of: {closest(name, group_options(group))}"
    unknown_field = re.search(r"Could not override '([^']+)'\.\s*(Key '[^']+' is not in struct)?", text)
    if unknown_field:
        return _unknown_key(unknown_field[1], config_name)
    if re.search(
        r"no viable alternative|mismatched input|extraneous input|token recognition|missing EQUAL|"
        r"NoViableAlt",
        text,
    ):
        reason = text.splitlines()[0]
        return f"cannot read this override: {reason}; write key=value, in quotes if it has special characters"
    key = re.search(r"full_key: (\S+)", text)
    value = re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    if value:
        return f"{key[1] if key else 'a field'} takes {_kind(value[2])}, got {value[1]}"
    if key and key[1].startswith("hydra.runtime.choices."):
        group = key[1].removeprefix("hydra.runtime.choices.")
        return f"{group} needs one option; choose one of: {', '.join(group_options(group))}"
    if key:
        return f"{key[1]}: {text.splitlines()[0]}"
    return text.split("\nSee https", 1)[0]


def _kind(node: str) -> str:
    return {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}.get(
        node, f"a {node}"
    )


def _unknown_key(key: str, config_name: str) -> str:
    """Name the valid neighbours of a key that the config does not have."""
    from omegaconf import DictConfig, OmegaConf

    from afmoe.conf_tree import compose_defaults, config_groups, group_options, has_key

    key = key.split("@", 1)[0]
    if "/" in key or key in config_groups():
        return f"unknown group {key}; the groups are: {closest(key, config_groups())}"
    config = compose_defaults(config_name, sys.argv[1:])
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section, throw_on_resolution_failure=False) if section else config
    while section and not isinstance(node, DictConfig):
        section, _, name = section.rpartition(".")
        node = OmegaConf.select(config, section, throw_on_resolution_failure=False) if section else config
    where = f" in {section}" if section else ""
    group = section.replace(".", "/")
    if isinstance(node, DictConfig) and name in list(node):
        return f"unknown key {key}: {f'{section}.{name}'.lstrip('.')} is a value and has no fields"
    owners = [option for option in group_options(group) if has_key(group, option, name)]
    if owners:
        choice = " or ".join(f"{group}={option}" for option in owners)
        return f"unknown key {key}: the chosen {group} has no `{name}`; it belongs to {choice}"
    valid = [str(known) for known in node] if isinstance(node, DictConfig) else []
    if not section:
        valid = [*valid, *config_groups()]
    return f"unknown key {key}: there is no `{name}`{where}; the closest: {closest(name, set(valid))}"
