"""A small checkpoint directory, and the programs of scripts/ run on it in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from afmoe.checkpoint.pretrained import save_pretrained
from afmoe.config import AfmoeConfig
from afmoe.model import AfmoeForCausalLM

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
FIELDS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "sliding_window": 4,
    "route_scale": 2.5,
}


def small_model(**fields: Any) -> AfmoeForCausalLM:
    """Norms, biases and selection bias not at their trivial initial values, most experts in use."""
    model = AfmoeForCausalLM(
        AfmoeConfig(**FIELDS | {"mup_enabled": True} | fields), attention="reference", compute="reference"
    )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.01 if "selection_bias" in name else 0.1)
    return model


def save_small(directory: Path, layout: str = "hf", **fields: Any) -> Path:
    save_pretrained(small_model(**fields), directory, layout)
    return directory


def run_script(name: str, *arguments: object) -> int:
    """Exit code of `python scripts/NAME.py ARGUMENTS`."""
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        return 0 if end.code is None else int(end.code)
    finally:
        sys.argv = before
    return 0


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Everything in the safetensors files of a directory, by the library's own reader."""
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def edit(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite the one weights file of a directory."""
    path = directory / "model.safetensors"
    changed = change(load_file(path))
    save_file({key: tensor.clone() for key, tensor in changed.items()}, path)


def assert_bitwise(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].dtype == tensor.dtype, key
        assert torch.equal(tensors[key].view(torch.uint8), tensor.view(torch.uint8)), key
