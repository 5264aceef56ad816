"""Inputs for an expert layer, and the outputs and gradients of a plugin on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from afmoe.hardware import Hardware, c_compiler
from afmoe.moe.compute import ExpertShape
from afmoe.registry import build, configure

CPU = Hardware(device_type="cpu", has_c_compiler=c_compiler() is not None)
needs_compiler = pytest.mark.skipif(
    not CPU.has_c_compiler, reason="needs a C compiler; torch computes without"
)

BY_TORCH = " by torch"

# empty experts first, last and between; one row; one below, at and above a block of 128; all to one; none
COUNTS = [
    (0, 127, 1, 0, 129, 128, 0),
    (0, 300, 0),
    (1,),
    (0, 0, 0),
]


@dataclass
class Case:
    x_RD: Tensor
    offsets_L: Tensor
    gate_LFD: Tensor
    up_LFD: Tensor
    down_LDF: Tensor
    grad_y_RD: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        return replace(
            self,
            **{name: value.to(dtype) for name, value in vars(self).items() if value.is_floating_point()},
        )

    @property
    def num_rows(self) -> int:
        """Rows that belong to an expert."""
        return int(self.offsets_L[-1])

    @property
    def counts(self) -> list[int]:
        return self.offsets_L.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()


def make_case(
    counts: tuple[int, ...], *, num_padding_rows: int = 0, hidden_size: int = 64, intermediate_size: int = 48
) -> Case:
    num_experts, num_rows = len(counts), sum(counts) + num_padding_rows
    return Case(
        x_RD=torch.randn(num_rows, hidden_size),
        offsets_L=torch.tensor(counts).cumsum(0).to(torch.int32),
        gate_LFD=torch.randn(num_experts, intermediate_size, hidden_size) / hidden_size**0.5,
        up_LFD=torch.randn(num_experts, intermediate_size, hidden_size) / hidden_size**0.5,
        down_LDF=torch.randn(num_experts, hidden_size, intermediate_size) / intermediate_size**0.5,
        grad_y_RD=torch.randn(num_rows, hidden_size),
    )


def build_compute(choice: Any, case: Case, activation: str = "silu") -> Any:
    """A plugin by its name or options; `NAME by torch` is the one without compiled kernels."""
    if isinstance(choice, str) and choice.endswith(BY_TORCH):
        choice = {"name": choice.removesuffix(BY_TORCH), "compiled": "false"}
    return build(configure("moe/compute", choice), shape=shape_of(case, activation), hardware=CPU)


def shape_of(case: Case, activation: str = "silu") -> ExpertShape:
    num_experts, intermediate_size, hidden_size = case.up_LFD.shape
    return ExpertShape(
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
    )


def outputs_and_gradients(compute: Any, case: Case) -> dict[str, Tensor]:
    """y and the gradients of sum(y * grad_y) with respect to x and the weights."""
    names = ("x_RD", "gate_LFD", "up_LFD", "down_LDF")
    leaves = [getattr(case, name).detach().clone().requires_grad_() for name in names]
    y_RD = compute(leaves[0], case.offsets_L, *leaves[1:])
    return {"y_RD": y_RD.detach()} | dict(
        zip(names, torch.autograd.grad(y_RD, leaves, case.grad_y_RD), strict=True)
    )


def deviation(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||, in fp64; 0 where both are zero or have no element."""
    difference = (value.double() - expected.double()).norm()
    return 0.0 if difference == 0 else (difference / expected.double().norm()).item()
