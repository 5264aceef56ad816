"""`attention=flash`: the kernel of the flash-attn package for sequences of different lengths.

Documents are sequences of their own and padding is taken out (`varlen.py`), so that neither costs anything.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from afmoe.attention import AttentionPlugin
from afmoe.attention.layout import SequenceLayout
from afmoe.attention.varlen import Sequences, sequences, varlen_attention
from afmoe.errors import MachineError
from afmoe.hardware import Hardware
from afmoe.moe.grouped_mm import product_dtype
from afmoe.registry import register

PACKAGE = "flash_attn"
_LARGEST_HEAD = 256
_NO_PACKAGE = (
    "attention=flash needs the package flash-attn, which is not installed; "
    "pip install flash-attn --no-build-isolation, or use attention=sdpa"
)


@register("attention", "flash")
class FlashAttention(AttentionPlugin):
    """In bf16 or fp16. Once a forward it waits for the GPU: packed or padded rows have to be counted."""

    leaves_graph = True

    @dataclass(kw_only=True)
    class Config:
        pass

    def __init__(self, config: Config, *, window: int, hardware: Hardware | None = None) -> None:
        super().__init__(config, window=window, hardware=hardware)
        try:
            package = importlib.import_module(PACKAGE)
        except ImportError as error:
            raise MachineError(_NO_PACKAGE) from error
        self._kernel = package.flash_attn_varlen_func

    @classmethod
    def why_not(
        cls, config: Config, *, hardware: Hardware, head_dim: int, dropout: float, is_training: bool
    ) -> str | None:
        if hardware.capability is None or hardware.capability < (8, 0):
            return (
                "attention=flash needs a CUDA GPU of sm_80 or newer, this machine's device is "
                f"{hardware.architecture}; use attention=sdpa"
            )
        if head_dim > _LARGEST_HEAD:
            return (
                f"attention=flash takes a head_dim of at most {_LARGEST_HEAD}, model.head_dim is {head_dim}; "
                "use attention=sdpa"
            )
        return None if importlib.util.find_spec(PACKAGE) else _NO_PACKAGE

    @classmethod
    def why_no_static_cache(cls, *, device_type: str, is_compiled: bool) -> str | None:
        return (
            "attention=flash cannot read a static cache: its kernel takes keys in their order; use "
            "cache=growing, or attention=sdpa"
        )

    def prepare(self, layout: SequenceLayout) -> tuple[Sequences, Sequences]:
        """The sequences of full and of sliding layers."""
        full = sequences(layout, None)
        return full, sequences(layout, self.window) if layout.num_cached else full

    def __call__(
        self,
        query_BSHC: Tensor,
        key_BSGC: Tensor,
        value_BSGC: Tensor,
        prepared: tuple[Sequences, Sequences],
        *,
        is_sliding: bool,
        dropout: float,
    ) -> Tensor:
        dtype = product_dtype(value_BSGC)
        if dtype not in (torch.bfloat16, torch.float16):
            raise MachineError(
                f"attention=flash computes in bf16 or fp16, this model in {dtype}; "
                "use trainer.precision=bf16-mixed, or attention=sdpa"
            )
        query_BSHC, key_BSGC, value_BSGC = (x.to(dtype) for x in (query_BSHC, key_BSGC, value_BSGC))
        return varlen_attention(
            self._kernel,
            query_BSHC,
            key_BSGC,
            value_BSGC,
            prepared[is_sliding],
            window=self.window if is_sliding else None,
            dropout=dropout,
        )
