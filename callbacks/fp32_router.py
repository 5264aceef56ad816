"""Keeps routers in fp32."""

from __future__ import annotations

from dataclasses import dataclass

from afmoe.moe.block import MoeBlock
from afmoe.registry import register
from callbacks.moe_callback import MoeCallback


@register("callbacks", "fp32_router")
class Fp32Router(MoeCallback):
    """Stores router weights in fp32 and multiplies in fp32, whatever the precision of the run.

    bf16 keeps 8 significant bits: near-equal logits tie, and the top-8 set of 3.5 % of the tokens of a 2048
    -> 128 router changes.
    """

    effect = "router weights and product kept in fp32"

    @dataclass(kw_only=True)
    class Config:
        pass

    def prepare(self, block: MoeBlock) -> None:
        # set first: with it the weights stay fp32 when the trainer casts the model to its precision
        block.router.fp32 = True
        block.router.gate.float()
