"""Expert compute: the MLP of all local experts in one call, on rows that are sorted by expert.

    hidden = activation(x @ gate[e].T) * (x @ up[e].T)        y = hidden @ down[e].T

Experts may have no gate (hidden = activation(x @ up[e].T)) and a bias on every projection. A plugin that
cannot multiply them says so in `why_not`.

The contract that every plugin keeps, and that tests/compute checks against `reference`:

- `offsets_L` (int32, on the rows' device) holds the row at which each expert ends; expert e owns the rows
  from `offsets_L[e - 1]` (0 for the first) up to `offsets_L[e]`.
- Rows past `offsets_L[-1]` are padding: they come back exactly zero and get exactly zero gradient.
- An expert without rows gets exactly zero weight gradients. No rows at all (R = 0) works.
- The gradient of y may arrive expanded or non-contiguous.
- y has the dtype of x, under autocast the autocast dtype; gradients have the dtype of what they belong to.
- Router weights are applied outside, by the dispatcher's `combine`.
- On a CUDA device no plugin waits for the GPU, except where its docstring says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.grouped_mm import Biases, ExpertWeights, RowSource


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts that a plugin is asked to multiply.

    Raises `ConfigError` for an activation that is unknown or that needs a gate which the experts lack.
    """

    num_experts: int
    """The local ones (L)."""
    hidden_size: int
    intermediate_size: int
    """Width of one expert (F)."""
    activation: str
    gated: bool = True
    has_bias: bool = False
    """Whether every projection has one."""

    def __post_init__(self) -> None:
        if activation_named(self.activation).needs_gate and not self.gated:
            raise ConfigError(f"hidden_act={self.activation} needs experts with a gate; use silu")


class ExpertCompute(ABC):
    """A plugin of the group `moe/compute`, made by `registry.build(config, shape=..., hardware=...)`."""

    Config: ClassVar[type]
    name: ClassVar[str]
    leaves_graph: ClassVar[bool] = False
    """Whether `torch.compile` has to break its graph around the call."""
    description: str
    """One line for people: what runs, in which precision, emulated or not."""

    @abstractmethod
    def __init__(self, config: Any, *, shape: ExpertShape, hardware: Hardware | None = None) -> None:
        """`hardware` None: the machine that this runs on."""

    @classmethod
    @abstractmethod
    def why_not(cls, config: Any, *, hardware: Hardware, shape: ExpertShape) -> str | None:
        """Why this cannot run there and what would, in one sentence; None: it can. Asks the record only."""

    def __call__(
        self,
        x_RD: Tensor,
        offsets_L: Tensor,
        gate_LFD: Tensor | None,
        up_LFD: Tensor,
        down_LDF: Tensor,
        biases: Biases | None = None,
        source: RowSource | None = None,
    ) -> Tensor:
        """y_RD of the module docstring, differentiable in x, the weights and the biases (None: without).

        `source`: what x was gathered from, if it was, for a plugin that would rather keep that for backward.
        """
        weights = ExpertWeights(gate_LFD, up_LFD, down_LDF, *(biases or ()))
        return self.multiply(x_RD, offsets_L, weights, source)

    @abstractmethod
    def multiply(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None
    ) -> Tensor:
        """The call, its weights in one tuple."""

    def on_weights_updated(self) -> None:  # noqa: B027 (most derive nothing)
        """Drop what was derived from the weights. Called after each optimizer step and after loading."""


def check_compute(
    plugin: type[ExpertCompute], config: Any, *, hardware: Hardware, shape: ExpertShape
) -> None:
    """Raise `MachineError` with the plugin's reason when it cannot run there."""
    reason = plugin.why_not(config, hardware=hardware, shape=shape)
    if reason is not None:
        raise MachineError(reason)


def why_not_these_experts(
    choice: str, shape: ExpertShape, instead: str, *, gate_needed: bool = True
) -> str | None:
    """The reason of a choice that multiplies experts without biases, and only gated ones if `gate_needed`."""
    kinds = (("no gate", gate_needed and not shape.gated), ("biases", shape.has_bias))
    unusual = [kind for kind, is_so in kinds if is_so]
    if not unusual:
        return None
    return f"{choice} multiplies gated experts without biases, these have {' and '.join(unusual)}; {instead}"


def all_reasons(*reasons: str | None) -> str | None:
    """Those that hold, as one text; None: there is none."""
    return ". Also, ".join(reason for reason in reasons if reason) or None
