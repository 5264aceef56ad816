"""Attention: the layer, and how its softmax is computed (a plugin of the group `attention`).

The contract that every plugin keeps, and that tests/model checks against `reference`:

- `prepare` is called once per forward; what it returns is handed to every layer of that forward.
- A query sees what `SequenceLayout` says and nothing else: never another document, never padding, in a
  sliding layer never more than `window` tokens, itself included. Outputs of padding tokens are finite and of
  no meaning.
- Scores are divided by sqrt(C); the softmax is taken in fp32 at least.
- With cached tokens the keys of a sliding layer may be the last ones only: they end at the newest token.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from afmoe.attention.layout import SequenceLayout
from afmoe.errors import MachineError
from afmoe.hardware import Hardware


class AttentionPlugin(Protocol):
    """What a plugin of the group `attention` offers. Made by `registry.build(config, window=..., ...)`.

    As a base class it gives what a plugin has that runs anywhere and waits for nothing.
    """

    Config: ClassVar[type]
    name: ClassVar[str]
    leaves_graph: ClassVar[bool] = False
    """Whether `torch.compile` has to break its graph around the call."""
    window: int
    layer_kinds: frozenset[bool] = frozenset((False, True))
    """Set by the model once it has its layers: whether some are sliding (True), some full (False). `prepare`
    need not serve a kind that is not there, and must not leave work for the layers to do once."""

    def __init__(self, config: Any, *, window: int, hardware: Hardware | None = None) -> None:
        """`window`: tokens that a query of a sliding layer sees, itself included."""
        self.window = window

    @classmethod
    def why_not(
        cls, config: Any, *, hardware: Hardware, head_dim: int, dropout: float, is_training: bool
    ) -> str | None:
        """Why this cannot run there and what would, in one sentence; None: it can.

        `is_training`: backward is wanted, and `dropout` of the attention weights.
        """
        return None

    @classmethod
    def why_no_static_cache(cls, *, device_type: str, is_compiled: bool) -> str | None:
        """Why it cannot read keys that lie in slots, in no order, as `StaticCache` keeps them, and what can.

        None: it can. `is_compiled`: in a step that is one compiled graph.
        """
        return None

    def prepare(self, layout: SequenceLayout) -> Any:
        """Masks, or whatever the kernel wants in their place, for both kinds of layer."""
        ...

    def __call__(
        self,
        query_BSHC: Tensor,
        key_BSGC: Tensor,
        value_BSGC: Tensor,
        prepared: Any,
        *,
        is_sliding: bool,
        dropout: float,
    ) -> Tensor:
        """The mixed values [B, S, H, C]. `dropout`: probability with which an attention weight is dropped."""
        ...


def check_attention(
    plugin: type[AttentionPlugin],
    config: Any,
    *,
    hardware: Hardware,
    head_dim: int,
    dropout: float,
    is_training: bool = False,
) -> None:
    """Raise `MachineError` with the plugin's reason when it cannot run there."""
    reason = plugin.why_not(
        config, hardware=hardware, head_dim=head_dim, dropout=dropout, is_training=is_training
    )
    if reason is not None:
        raise MachineError(reason)
