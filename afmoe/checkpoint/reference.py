"""transformers' AFMoE on a checkpoint's own files, one layer at a time: the other side of a verification.

Nothing here goes through our layouts, our file reader or our config: transformers reads `config.json` and
converts the raw tensors itself. For the layouts that it does not know (`prime`, `canonical`) there is a
second table of names below, written apart from `layouts.py`, so that a mistake in one of them shows.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AfmoeConfig as TransformersConfig
from transformers import AfmoeForCausalLM as TransformersModel

from afmoe.errors import ConfigError

# name here to transformers' name, one tensor an expert where the name holds `{}`
_NAMES = {
    "canonical": {
        "mlp.router.selection_bias": "mlp.expert_bias",
        "mlp.experts.gate_proj": "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.up_proj": "mlp.experts.{}.up_proj.weight",
        "mlp.experts.down_proj": "mlp.experts.{}.down_proj.weight",
        "mlp.shared_expert.gate_proj.weight": "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight": "mlp.shared_experts.up_proj.weight",
        "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.down_proj.weight",
    },
    "prime": {
        "mlp.experts.w1": "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.w3": "mlp.experts.{}.up_proj.weight",
        "mlp.experts.w2": "mlp.experts.{}.down_proj.weight",
        "mlp.shared_expert.w1": "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_expert.w3": "mlp.shared_experts.up_proj.weight",
        "mlp.shared_expert.w2": "mlp.shared_experts.down_proj.weight",
    },
}


class ReferenceLayers:
    """Models of one layer each, in fp32, eager attention and experts.

    `rounding`: bring every weight but the selection bias to this dtype first.
    """

    def __init__(self, directory: Path, layout: str, rounding: torch.dtype | None = None) -> None:
        self.directory = directory
        self.rounding = rounding
        self.layout = layout
        self.config = TransformersConfig.from_pretrained(directory)
        self._files = {path: safe_open(path, framework="pt") for path in directory.glob("*.safetensors")}
        self._file_of = {key: path for path, file in self._files.items() for key in file.keys()}  # noqa: SIM118

    def model_of(self, layer: int) -> TransformersModel:
        """A model whose only layer is number `layer`, with the checkpoint's final norm.

        Only the first layer's scales embeddings (muP): give the others hidden states as they are.
        """
        config: Any = copy.deepcopy(self.config)
        config.layer_types = [config.layer_types[layer]]
        config.num_dense_layers = int(layer < config.num_dense_layers)
        config.num_hidden_layers = 1
        config.mup_enabled = self.config.mup_enabled and layer == 0
        config.tie_word_embeddings = False
        # embedding and head are compared apart, in pieces
        config.vocab_size, config.pad_token_id = 1, None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            loaded: Any = TransformersModel.from_pretrained(
                None,
                config=config,
                state_dict=self._state(layer),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
        model, report = loaded
        self._check(model, report, layer)
        return model.eval()

    def embedding_rows(self, ids_S: Tensor) -> Tensor:
        table = self._slice("model.embed_tokens.weight")
        return self._round(torch.cat([table[row : row + 1] for row in ids_S.tolist()])).float()

    def head_rows(self, rows: range) -> Tensor:
        is_tied = self.config.tie_word_embeddings
        table = self._slice("model.embed_tokens.weight" if is_tied else "lm_head.weight")
        return self._round(table[rows.start : rows.stop]).float()

    def _slice(self, key: str):
        return self._files[self._file_of[key]].get_slice(key)

    def _read(self, key: str) -> Tensor:
        tensor = self._files[self._file_of[key]].get_tensor(key)
        return tensor if key.endswith(("expert_bias", "selection_bias")) else self._round(tensor)

    def _round(self, tensor: Tensor) -> Tensor:
        return tensor if self.rounding is None else tensor.to(self.rounding)

    def _state(self, layer: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{layer}."
        state = {key.removeprefix(prefix): self._read(key) for key in self._file_of if key.startswith(prefix)}
        for name, other in _NAMES.get(self.layout, {}).items():
            if name in state:
                tensor = state.pop(name)
                each = enumerate(tensor) if "{}" in other else [(0, tensor)]
                state |= {other.format(expert): weights for expert, weights in each}
        state = {f"model.layers.0.{name}": tensor for name, tensor in state.items()}
        return state | {"model.norm.weight": self._read("model.norm.weight")}

    def _check(self, model: TransformersModel, report: dict, layer: int) -> None:
        """Whether transformers found all of the layer. Missing may be what is not asked for or has no
        elements, and the selection bias of a model without any: it starts from zero."""
        parameters = dict(model.named_parameters())
        missing = sorted(
            key
            for key in report["missing_keys"]
            if key not in ("model.embed_tokens.weight", "lm_head.weight")
            and not key.endswith("expert_bias")
            and parameters[key].numel()
        )
        problems = [*missing, *sorted(map(str, report["mismatched_keys"])), *report["error_msgs"]]
        if problems:
            raise ConfigError(
                f"{self.directory} ({self.layout}): transformers {transformers.__version__} cannot load "
                f"layer {layer}: {', '.join(problems[:10])}; its older versions know the layout hf only"
            )
