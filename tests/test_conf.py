"""Every option of every group composes, and says the same as the plugin behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from afmoe import CONF_DIRECTORY
from afmoe.conf_tree import config_groups, group_options
from afmoe.config import (
    AfmoeConfig,
    CheckpointConfig,
    ExportConfig,
    MemoryConfig,
    ModelConfig,
    SamplesConfig,
    TokenizerConfig,
    TrainerConfig,
)
from afmoe.plugins import PLUGINS
from afmoe.registry import find

OPTIONS = [(group, name) for group in sorted(config_groups()) for name in group_options(group)]
PLUGIN_OPTIONS = [(group, name) for group, name in OPTIONS if group in PLUGINS]


@pytest.fixture(autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF_DIRECTORY), version_base="1.3"):
        yield


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes(group: str, name: str) -> None:
    choice = f"[{name}]" if group == "callbacks" else name
    config = compose("sft", [f"{group}={choice}", "run_name=test"], return_hydra_config=True)
    assert OmegaConf.to_container(config, resolve=False)


def test_options_and_plugins_are_the_same_names() -> None:
    for group, plugins in PLUGINS.items():
        assert set(group_options(group)) == set(plugins), group


@pytest.mark.parametrize(("group", "name"), PLUGIN_OPTIONS)
def test_yaml_holds_the_plugins_options_with_their_defaults(group: str, name: str) -> None:
    section = OmegaConf.to_container(OmegaConf.load(CONF_DIRECTORY / group / f"{name}.yaml"))
    assert isinstance(section, dict)
    if group == "callbacks":
        assert list(section) == [name], "the YAML of a callback holds one key, its name"
        section = section[name]
    assert section.pop("name") == name
    assert section == dataclasses.asdict(find(group, name).Config())


@pytest.mark.parametrize("name", group_options("model"))
def test_model_presets_hold_every_field(name: str) -> None:
    section = OmegaConf.load(CONF_DIRECTORY / "model" / f"{name}.yaml")
    # `explicit` is worked out from the command line
    assert set(section) == {field.name for field in dataclasses.fields(ModelConfig)} - {"explicit"}
    fields = {key: section[key] for key in section if key not in ("pretrained", "revision")}
    AfmoeConfig(**fields)


def test_trainer_yaml_holds_every_field() -> None:
    section = OmegaConf.load(CONF_DIRECTORY / "trainer" / "default.yaml")
    assert set(section) | {"strategy"} == {field.name for field in dataclasses.fields(TrainerConfig)}


@pytest.mark.parametrize(
    ("section", "config"),
    [
        ("tokenizer", TokenizerConfig),
        ("checkpoint", CheckpointConfig),
        ("memory", MemoryConfig),
        ("export", ExportConfig),
        ("samples", SamplesConfig),
    ],
)
def test_sections_of_the_main_file_hold_their_defaults(section: str, config: type) -> None:
    assert OmegaConf.to_container(compose("sft", ["run_name=test"])[section]) == dataclasses.asdict(config())


def test_trinity_presets_have_the_published_sizes() -> None:
    import torch

    from afmoe.model import AfmoeForCausalLM

    # total and active parameters, in billions, of the model cards (embedding and head included)
    published = {
        "trinity_nano": (6.120, 1.024),
        "trinity_mini": (26.124, 3.475),
        "trinity_large": (398.635, 13.372),
    }
    for name, (total, active) in published.items():
        section = OmegaConf.to_container(OmegaConf.load(CONF_DIRECTORY / "model" / f"{name}.yaml"))
        assert isinstance(section, dict)
        del section["pretrained"], section["revision"]
        with torch.device("meta"):
            model = AfmoeForCausalLM(AfmoeConfig(**section))
        assert model.num_parameters() / 1e9 == pytest.approx(total, abs=5e-4)
        assert model.num_parameters(active=True) / 1e9 == pytest.approx(active, abs=5e-4)
