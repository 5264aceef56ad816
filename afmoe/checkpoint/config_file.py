"""`config.json` to and from `AfmoeConfig`.

Read are transformers' form and the older published one (`rope_theta`, `rope_scaling`, routing fields at top
level). No field is passed over in silence: a field that changes the maths is obeyed or refused with its
value, one that does not is in a list below, and any other is an error. Written is what transformers 5
writes for the same config.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from afmoe.checkpoint.atomic import write_text
from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError

CONFIG = "config.json"
MODEL_TYPE = "afmoe"

# say nothing about the maths: provenance, storage type, implementation choices, training-only settings
HARMLESS_FIELDS = {
    "_attn_implementation",
    "_experts_implementation",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "load_balance_coeff",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_grouped_mm",
}

# would change the maths; only the values under which they do nothing are accepted
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n_group": (1, None),
    "num_expert_groups": (1, None),
    "num_limited_groups": (1, None),
    "partial_rotary_factor": (1.0, None),
    "quantization": (None,),
    "quantization_config": (None,),
    "topk_group": (1, None),
}

# ours: transformers knows neither these fields nor another value than the one here
_VALUES_IN_TRANSFORMERS = {
    "norm_order": "scale_then_cast",
    "score_func": "sigmoid",
    "route_norm": True,
    "score_before_experts": False,
}
_OUR_FIELDS = {*_VALUES_IN_TRANSFORMERS, "router_init", "rope_theta", "rope_scaling"}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "dict[str, Any]": (dict,),
    "list[str]": (list,),
    "Any": (int, list, type(None)),
}


def read_config(directory: Path) -> AfmoeConfig:
    """The model config of a checkpoint directory. Raises `ConfigError` naming the field and the file."""
    path = directory / CONFIG
    fields = read_json(path)
    model_type = fields.get("model_type")
    if model_type != MODEL_TYPE:
        raise ConfigError(f"{path}: model_type is {model_type!r}, only {MODEL_TYPE!r} can be loaded")
    for name, neutral in NEUTRAL_VALUES.items():
        if fields.get(name) not in neutral:
            raise ConfigError(
                f"{path}: {name}={fields[name]!r} changes the maths and is not supported, only {neutral[0]!r}"
            )
    known = {field.name: str(field.type) for field in dataclasses.fields(AfmoeConfig)}
    unknown = sorted(fields.keys() - known.keys() - HARMLESS_FIELDS - NEUTRAL_VALUES.keys())
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise ConfigError(
            f"{path}: unknown field {', '.join(unknown[:10])}{more}; remove what does not change the maths"
        )
    chosen = {name: value for name, value in fields.items() if name in known}
    for name, value in chosen.items():
        _check_type(path, name, value, known[name])
    _check_rope(path, chosen)
    try:
        config = AfmoeConfig(**chosen)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    # the older form is in `rope_parameters` by now
    return dataclasses.replace(config, rope_theta=None, rope_scaling=None)


def config_fields(config: AfmoeConfig, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """The content of `config.json`, sorted as transformers sorts it.

    Layouts `hf` and `hf_fused` are for transformers: a config that it cannot express is a `ConfigError`
    there. The others carry our own fields where they differ from transformers' maths.
    """
    if layout in ("hf", "hf_fused"):
        check_expressible(config, layout)
    fields = dataclasses.asdict(config)
    # a subclass may hold more than the model, such as where its weights came from
    fields = {field.name: fields[field.name] for field in dataclasses.fields(AfmoeConfig)}
    for name in _OUR_FIELDS:
        if fields[name] == _VALUES_IN_TRANSFORMERS.get(name) or name not in _VALUES_IN_TRANSFORMERS:
            del fields[name]
    fields |= {
        "architectures": ["AfmoeForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": MODEL_TYPE,
        "transformers_version": version("transformers"),
    }
    fields["rope_parameters"] = dict(sorted(fields["rope_parameters"].items()))
    return dict(sorted(fields.items()))


def write_config(config: AfmoeConfig, directory: Path, layout: str, dtype: torch.dtype) -> None:
    write_json(directory / CONFIG, config_fields(config, layout, dtype))


def check_expressible(config: AfmoeConfig, layout: str) -> None:
    """Raises `ConfigError` when transformers would compute something else with the exported weights."""
    for name, value in _VALUES_IN_TRANSFORMERS.items():
        ours = getattr(config, name)
        if ours != value:
            raise ConfigError(
                f"layout {layout} is for transformers, which always has {name}={value}, and this model has "
                f"{ours}; choose layout canonical"
            )
    # an activation of ours that carries a value, `clamped_swiglu:LIMIT`
    if ":" in config.hidden_act:
        raise ConfigError(
            f"layout {layout} is for transformers, which has no hidden_act={config.hidden_act}; choose "
            "layout canonical"
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; a model directory holds {CONFIG} and safetensors") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(fields).__name__}")
    return fields


def write_json(path: Path, fields: dict[str, Any]) -> None:
    write_text(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _check_type(path: Path, name: str, value: Any, annotation: str) -> None:
    accepted = _TYPES[annotation.removesuffix(" | None")]
    if annotation.endswith(" | None") and value is None:
        return
    # bool is an int in Python, not in a config
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise ConfigError(f"{path}: {name} must be {annotation}, got {value!r}")


def _check_rope(path: Path, fields: dict[str, Any]) -> None:
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    if parameters is not None and scaling is not None:
        raise ConfigError(f"{path}: both rope_parameters and rope_scaling are given; keep rope_parameters")
    for name, value in (parameters or scaling or {}).items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: rotary settings for {name} alone are not supported, only for all layers"
            )
    theta = fields.get("rope_theta")
    if parameters is not None and theta is not None and parameters.setdefault("rope_theta", theta) != theta:
        raise ConfigError(f"{path}: rope_theta={theta} contradicts rope_parameters={parameters}")
    factor = (parameters or scaling or {}).get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor={factor!r} is not supported, only 1.0")
