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

from typing import Any, ClassVar, Protocol

from torch import Tensor

from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.activations import activation_named
from afmoe.moe.grouped_mm import Biases, RowSource


class ExpertCompute(Protocol):
    """What a plugin of the group `moe/compute` offers, made by `registry.build(config, num_experts=...)`."""

    Config: ClassVar[type]
    name: ClassVar[str]

    @property
    def description(self) -> str:
        """One line for people: what runs, in which precision, emulated or not."""
        ...

    def __init__(
        self,
        config: Any,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        hardware: Hardware | None = None,
    ) -> None:
        """`num_experts` counts the local experts (L), `intermediate_size` is the width of one (F).

        `hardware` None: the machine that this runs on.
        """
        ...

    @classmethod
    def why_not(
        cls,
        config: Any,
        *,
        hardware: Hardware,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        gated: bool = True,
        has_bias: bool = False,
    ) -> str | None:
        """Why this cannot run there and what would, in one sentence; None: it can. Asks the record only.

        `gated`, `has_bias`: what the experts are; handed over only where they differ from the default.
        """
        ...

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

        `source`: what x was gathered from, if it
        was, for a plugin that would rather keep that for backward.
        """
        ...

    def on_weights_updated(self) -> None:
        """Drop what was derived from the weights. Called after each optimizer step and after loading."""
        ...


def check_compute(
    plugin: type[ExpertCompute],
    config: Any,
    *,
    hardware: Hardware,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: str,
    gated: bool = True,
    has_bias: bool = False,
) -> None:
    """Raise `MachineError` with the plugin's reason when it cannot run there.

    Raises `ConfigError` for an activation that is unknown or that needs a gate which the experts lack.
    """
    if activation_named(activation).needs_gate and not gated:
        raise ConfigError(f"hidden_act={activation} needs experts with a gate; use silu")
    unusual = {} if gated and not has_bias else {"gated": gated, "has_bias": has_bias}
    reason = plugin.why_not(
        config,
        hardware=hardware,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
        **unusual,
    )
    if reason is not None:
        raise MachineError(reason)


def why_not_these_experts(choice: str, gated: bool, has_bias: bool, instead: str) -> str | None:
    """The reason of a choice that multiplies gated experts without biases and no others."""
    unusual = [kind for kind, is_so in (("no gate", not gated), ("biases", has_bias)) if is_so]
    if not unusual:
        return None
    return f"{choice} multiplies gated experts without biases, these have {' and '.join(unusual)}; {instead}"


def all_reasons(*reasons: str | None) -> str | None:
    """Those that hold, as one text; None: there is none."""
    return ". Also, ".join(reason for reason in reasons if reason) or None
