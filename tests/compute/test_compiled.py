"""The gated MLP of all experts in a compiled graph: one operator, eager numbers, one graph for all counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import COUNTS, Case, build_compute, make_case, outputs_and_gradients

import afmoe.moe.grouped_mm  # noqa: F401  (registers the operators)


@pytest.mark.parametrize("by_grouped_mm", [False, True], ids=["segments", "grouped_mm"])
@pytest.mark.parametrize("trained", ["all", "x", "weights"])
@pytest.mark.parametrize("gathered", [False, True])
def test_the_operator_keeps_what_torch_asks_of_one(trained: str, by_grouped_mm: bool, gathered: bool):
    case = make_case((0, 5, 3), num_padding_rows=2)
    operands = [case.x_RD, case.gate_LFD, case.up_LFD, case.down_LDF]
    for operand in {"all": operands, "x": operands[:1], "weights": operands[1:]}[trained]:
        operand.requires_grad_()
    token_of_row_R = torch.randint(6, case.x_RD.shape[:1])
    source = (torch.randn(6, case.x_RD.shape[1]), token_of_row_R) if gathered else (None, None)
    inputs = (*operands, None, None, None, case.offsets_L, *source, "silu", by_grouped_mm)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.afmoe.expert_mlp.default, inputs, test_utils=checks)


@pytest.mark.parametrize("name", ["native", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiled_plugin_is_one_graph_whatever_the_counts(name: str, dtype: torch.dtype):
    cases = [make_case(counts).to(dtype) for counts in (COUNTS[0], COUNTS[0][::-1], (385, 0, 0, 0, 0, 0, 0))]
    plugin = build_compute(name, cases[0])
    torch.compiler.reset()
    # a backend without code generation: needs no C++ compiler
    compiled = torch.compile(plugin.__call__, fullgraph=True, backend="aot_eager")

    def same(case: Case) -> None:
        expected, found = outputs_and_gradients(plugin, case), outputs_and_gradients(compiled, case)
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    same(cases[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in cases[1:]:
            same(case)


def test_an_activation_without_a_derivative_is_refused_in_a_graph():
    case = make_case((3, 2))
    compiled: Any = torch.compile(
        build_compute("native", case, "mish").__call__, fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="hidden_act=mish cannot be compiled"):
        outputs_and_gradients(compiled, case)
