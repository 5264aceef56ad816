"""The layouts in which AFMoE weights exist, each as one list of invertible steps from our canonical names.

    hf         what transformers' `save_pretrained` writes: one tensor an expert
    hf_fused   what it holds in memory, and writes with `save_original_format=False`: gate and up fused
    prime      prime-rl before its pull request 3411: w1 (gate), w2 (down), w3 (up) stacked
    canonical  our module names, prime-rl's since then: {gate,up,down}_proj stacked [experts, out, in]

Only names below `model.layers.{i}.` differ; embedding, final norm and head have the same names everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from afmoe.checkpoint.ops import (
    DropRuntimeState,
    EmptySharedExpert,
    FuseRows,
    Op,
    Rename,
    SelectionBias,
    SplitExperts,
)
from afmoe.errors import ConfigError, closest

PROJECTIONS = ("gate", "up", "down")
ROUTER = "mlp.router.gate.weight"
BIAS_NAMES = ("mlp.router.selection_bias", "mlp.expert_bias")

_BIAS_LIKE_TRANSFORMERS = SelectionBias("mlp.router.selection_bias", "mlp.expert_bias", BIAS_NAMES)
_SHARED_LIKE_TRANSFORMERS: list[Op] = [
    *(
        Rename(f"mlp.shared_expert.{part}_proj.weight", f"mlp.shared_experts.{part}_proj.weight")
        for part in PROJECTIONS
    ),
    EmptySharedExpert(*(f"mlp.shared_experts.{part}_proj.weight" for part in PROJECTIONS), router=ROUTER),
]
# counters and buffers that trainers and older transformers keep beside the weights
_RUNTIME = DropRuntimeState(
    r"mlp\.tokens_per_expert|mlp\.router\.tokens_per_expert|mlp\.reorderer\..*|self_attn\.rotary_emb\.inv_freq"
)

LAYOUTS: dict[str, list[Op]] = {
    "hf": [
        _RUNTIME,
        _BIAS_LIKE_TRANSFORMERS,
        *_SHARED_LIKE_TRANSFORMERS,
        *(
            SplitExperts(f"mlp.experts.{part}_proj", f"mlp.experts.{{}}.{part}_proj.weight")
            for part in PROJECTIONS
        ),
    ],
    "hf_fused": [
        _RUNTIME,
        _BIAS_LIKE_TRANSFORMERS,
        *_SHARED_LIKE_TRANSFORMERS,
        FuseRows("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.gate_up_proj"),
    ],
    "prime": [
        _RUNTIME,
        _BIAS_LIKE_TRANSFORMERS,
        *(
            Rename(f"mlp.{owner}.{part}_proj{suffix}", f"mlp.{owner}.{short}")
            for owner, suffix in (("experts", ""), ("shared_expert", ".weight"))
            for part, short in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        ),
    ],
    "canonical": [
        _RUNTIME,
        SelectionBias("mlp.router.selection_bias", "mlp.router.selection_bias", BIAS_NAMES),
    ],
}

# a key that no other layout has; any expert will do, so a rank's slice of the experts is recognised too
_SIGNS = {
    "hf": re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight"),
    "hf_fused": re.compile(r"model\.layers\.\d+\.mlp\.experts\.gate_up_proj"),
    "prime": re.compile(r"model\.layers\.\d+\.mlp\.experts\.w[123]"),
    "canonical": re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate|up)_proj"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(?:(\d+)(\..+)|.+)")


class ExpertKey(NamedTuple):
    """The key of a routed expert's tensor, in any layout."""

    prefix: str
    number: int | None
    """None: the tensor holds all experts, along its first dimension."""
    rest: str

    def renumbered(self, number: int) -> str:
        return f"{self.prefix}{number}{self.rest}"


def convert_layer(state: Mapping[str, Tensor], layer: int, source: str, target: str) -> dict[str, Tensor]:
    """The tensors of layer number `layer` of `state`, brought from layout `source` to layout `target`.

    Keys are full (`model.layers.3.mlp...`) on both sides; keys of other layers are left out. `state` is not
    changed.
    """
    prefix = layer_prefix(layer)
    tensors = {key[len(prefix) :]: tensor for key, tensor in state.items() if key.startswith(prefix)}
    try:
        for op in reversed(steps(source)):
            tensors = op.backward(tensors)
        for op in steps(target):
            tensors = op.forward(tensors)
    except ConfigError as error:
        raise ConfigError(f"{prefix[:-1]}: {error}") from error
    return {prefix + name: tensor for name, tensor in tensors.items()}


def convert(state: Mapping[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    """A whole state dict from layout `source` to layout `target`."""
    result = {key: tensor for key, tensor in state.items() if layer_of(key) is None}
    for layer in layers_of(state):
        result |= convert_layer(state, layer, source, target)
    return result


def detect_layout(keys: Iterable[str]) -> str:
    """The layout that `keys` follow. A model without any experts is the same in all layouts and counts as
    `hf`.

    Raises `ConfigError` that lists what was found when nothing fits or when layouts are mixed.
    """
    keys = list(keys)
    signs = {name: next(filter(sign.fullmatch, keys), None) for name, sign in _SIGNS.items()}
    found = {name: key for name, key in signs.items() if key is not None}
    if len(found) > 1:
        raise ConfigError(
            "layouts are mixed: " + ", ".join(f"{key} is {name}" for name, key in sorted(found.items()))
        )
    reserved = next((key for key in keys if ".shared_expert.output_gate" in key), None)
    if reserved is not None:
        raise ConfigError(f"{reserved}: a gate on the shared expert's output is not supported")
    if found:
        return next(iter(found))
    if layers_of(keys) and not any(".mlp.experts." in key or ".mlp.router." in key for key in keys):
        return "hf"
    families = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "{n}", key) for key in keys})
    shown = ", ".join(families[:10]) + (
        f", ... ({len(families)} kinds of keys)" if len(families) > 10 else ""
    )
    raise ConfigError(f"no layout of AFMoE ({', '.join(LAYOUTS)}) has these keys: {shown or 'none at all'}")


def is_runtime_state(key: str) -> bool:
    """Whether a key is state of a trainer, no weight: dropped when read."""
    return (
        re.fullmatch(_RUNTIME.pattern, _LAYER.sub("", key)) is not None or key == "model.rotary_emb.inv_freq"
    )


def is_selection_bias(key: str) -> bool:
    return _LAYER.sub("", key) in BIAS_NAMES


def expert_key(key: str) -> ExpertKey | None:
    """None for a key that belongs to no routed expert."""
    match = _EXPERT.fullmatch(key)
    if match is None:
        return None
    return ExpertKey(match[1], None if match[2] is None else int(match[2]), match[3] or "")


def name_in_layout(key: str, layout: str) -> str:
    """`key` as it is, but a selection bias under the name that it has in `layout`, whatever it is called."""
    if not is_selection_bias(key):
        return key
    prefix = _LAYER.match(key)
    own = next(op.other for op in steps(layout) if isinstance(op, SelectionBias))
    return (prefix[0] if prefix else "") + own


def stored_specs(specs: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """`specs` (meta tensors) as stored in `dtype`, None: as they are. Selection biases stay fp32."""
    return {
        key: spec.to(torch.float32 if is_selection_bias(key) else dtype or spec.dtype)
        for key, spec in specs.items()
    }


def steps(layout: str) -> list[Op]:
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout}; choose one of: {closest(layout, LAYOUTS)}")
    return LAYOUTS[layout]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_of(key: str) -> int | None:
    """The number of the layer that a key belongs to; None for embedding, final norm and head."""
    match = _LAYER.match(key)
    return int(match[1]) if match else None


def layers_of(keys: Iterable[str]) -> list[int]:
    return sorted({layer for layer in map(layer_of, keys) if layer is not None})
