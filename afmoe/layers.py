"""The parts every block is made of: RMSNorm, rotary embedding, dense feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from afmoe.config import AfmoeConfig
from afmoe.errors import ConfigError, closest
from afmoe.moe.activations import activation_named


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis, statistics in fp32 (fp64 for fp64 input).

    `order` says where the cast back to the input's dtype stands: `scale_then_cast` multiplies by the weight
    before it (transformers), `cast_then_scale` after it (the remote code published with the Trinity
    checkpoints). In fp32 both are the same.
    """

    def __init__(self, size: int, eps: float, order: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.order == "cast_then_scale":
            return self.weight.to(x.dtype) * normed.to(x.dtype)
        return (self.weight * normed).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, order={self.order}"


class RotaryEmbedding:
    """Cosines and sines of the positions, by transformers' rope functions.

    Not a module and without buffers: the frequencies stay fp32 whatever the model is cast to, and a model
    built on the meta device has them as well. The types `dynamic` and `longrope` choose the frequencies by
    the longest position of the batch, which has to be read from the device; the others depend on the
    configuration only.
    """

    def __init__(self, config: AfmoeConfig) -> None:
        parameters = dict(config.rope_parameters or {})
        self.rope_type = parameters["rope_type"]
        self.depends_on_length = self.rope_type in ("dynamic", "longrope")
        self.original_length = config.max_position_embeddings
        if self.rope_type == "longrope":
            self.original_length = parameters.get("original_max_position_embeddings", self.original_length)
        self._head_dim = config.head_dim
        self._theta = parameters["rope_theta"]
        self._transformers_config = None if self.rope_type == "default" else _transformers_config(config)
        frequencies, self.attention_scaling = self._frequencies(None)
        if frequencies.numel() != config.head_dim // 2:
            raise ConfigError(
                f"rope_parameters gives {frequencies.numel()} frequencies for head_dim={config.head_dim}, "
                f"AFMoE needs head_dim / 2 (partial_rotary_factor must be 1): {parameters}"
            )
        self._by_device = {frequencies.device: frequencies}

    def __call__(self, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`cos`, `sin` [B, S, 1, C/2], computed in fp32, returned in `dtype`."""
        device = position_ids_BS.device
        if self.depends_on_length:
            frequencies, scaling = self._frequencies((position_ids_BS.max() + 1).cpu())
            frequencies = frequencies.to(device)
        else:
            frequencies, scaling = self._on(device), self.attention_scaling
        angles = position_ids_BS[:, :, None, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        return cos.to(dtype), sin.to(dtype)

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._by_device:
            self._by_device[device] = next(iter(self._by_device.values())).to(device)
        return self._by_device[device]

    def _frequencies(self, length: Tensor | None) -> tuple[Tensor, float]:
        """fp32 frequencies [C/2] and a scale for a batch of that length (None: the configured one)."""
        # transformers makes tensors on the default device, which is meta while a preset is being sized up
        with torch.device("cpu"):
            if self._transformers_config is None:
                steps = torch.arange(0, self._head_dim, 2, dtype=torch.float32)
                return 1.0 / (self._theta ** (steps / self._head_dim)), 1.0
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            function: Any = ROPE_INIT_FUNCTIONS[self.rope_type]
            return function(self._transformers_config, torch.device("cpu"), seq_len=length)


def _transformers_config(config: AfmoeConfig) -> Any:
    """What transformers' rope functions read: its own class, which fills in what a rope type leaves out."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.afmoe.configuration_afmoe import AfmoeConfig as TransformersConfig

    parameters = dict(config.rope_parameters or {})
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_INIT_FUNCTIONS:
        names = {"default", *ROPE_INIT_FUNCTIONS}
        raise ConfigError(f"unknown rope_type={rope_type}; choose one of: {closest(rope_type, names)}")
    try:
        return TransformersConfig(
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
    except KeyError as error:
        raise ConfigError(f"rope_parameters={parameters}: {error.args[0]}") from error


def rotate(x_BSHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (channel c, channel c + C/2) by the angles of `RotaryEmbedding`."""
    first, second = x_BSHC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FeedForward(nn.Module):
    """Gated feed-forward, `down(activation(gate(x)) * up(x))`: the dense layers and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.activation = activation_named(activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation.hidden(self.gate_proj(x), self.up_proj(x)))
