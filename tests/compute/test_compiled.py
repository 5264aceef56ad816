"""A layer's experts in a compiled graph: one operator, eager numbers, one graph for all counts and layers."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import COUNTS, Case, build_compute, make_case, outputs_and_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from afmoe.moe.activations import activation_named
from afmoe.moe.compute.emulation import Emulation
from afmoe.moe.compute.grouped import GroupedMlp, SegmentsMlp
from afmoe.moe.compute.node import ExpertMlp, ExpertNode
from afmoe.moe.compute.rounding import Fp8Rounding
from afmoe.moe.compute.rounding_by_torch import TorchRounder
from afmoe.moe.experts import Experts
from afmoe.moe.grouped_mm import TorchProducts

OPERATORS = ["native", "bf16", "fp8", "mxfp8"]
SILU = activation_named("silu")
# a backend without code generation: needs no C++ compiler
BACKEND = "aot_eager"


@pytest.mark.parametrize(
    "mlp",
    [
        SegmentsMlp(SILU, kernels=None),
        GroupedMlp(SILU),
        Emulation(SILU, Fp8Rounding(TorchRounder(), "fp32"), TorchProducts(), wgrad_in_bf16=False),
    ],
    ids=["segments", "grouped_mm", "emulation"],
)
@pytest.mark.parametrize("trained", ["all", "x", "weights"])
@pytest.mark.parametrize("gathered", [False, True])
def test_the_operator_keeps_what_torch_asks_of_one(mlp: ExpertMlp, trained: str, gathered: bool):
    # without padding rows: what is saved of those is undefined, and would be compared
    case, node = make_case((0, 5, 3)), ExpertNode(mlp)
    operands = [case.x_RD, case.gate_LFD, case.up_LFD, case.down_LDF]
    for operand in {"all": operands, "x": operands[:1], "weights": operands[1:]}[trained]:
        operand.requires_grad_()
    token_of_row_R = torch.randint(6, case.x_RD.shape[:1])
    source = (torch.randn(6, case.x_RD.shape[1]), token_of_row_R) if gathered else (None, None)
    flags = (True, trained != "x", node.form, node.key)
    inputs = (*operands, None, None, None, case.offsets_L, *source, *flags)
    torch.library.opcheck(torch.ops.afmoe.expert_mlp.default, inputs)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiled_plugin_is_one_graph_whatever_the_counts(name: str, dtype: torch.dtype):
    counts = (COUNTS[0], COUNTS[0][::-1], (385, 0, 0, 0, 0, 0, 0), (0,) * 7)
    cases = [make_case(each, num_padding_rows=385 - sum(each)).to(dtype) for each in counts]
    plugin = build_compute(name, cases[0])
    compiled = in_a_graph(plugin)

    def same(case: Case) -> None:
        expected, found = outputs_and_gradients(plugin, case), outputs_and_gradients(compiled, case)
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    same(cases[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in cases[1:]:
            same(case)


def in_a_graph(plugin: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(plugin.__call__, fullgraph=True, backend=BACKEND)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_compiled_plugin_takes_no_rows_and_strided_gradients(name: str):
    case = make_case((40, 0, 24), num_padding_rows=3)
    plugin = build_compute(name, case)
    compiled = in_a_graph(plugin)
    grads = (case.grad_y_RD[:1, :1].expand_as(case.x_RD), case.grad_y_RD.t().contiguous().t())
    for one in (*(replace(case, grad_y_RD=grad) for grad in grads), make_case((0, 0, 0))):
        expected, found = outputs_and_gradients(plugin, one), outputs_and_gradients(compiled, one)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("trained", ["x", "weights", "gate", "down"])
def test_a_graph_gives_the_gradients_that_are_asked_for(name: str, trained: str):
    case = make_case((40, 0, 24))
    plugin = build_compute(name, case)

    def gradients(compute: Any) -> list[Tensor]:
        leaves = [leaf.clone() for leaf in (case.x_RD, case.gate_LFD, case.up_LFD, case.down_LDF)]
        wanted = {"x": leaves[:1], "weights": leaves[1:], "gate": leaves[1:2], "down": leaves[3:]}[trained]
        for leaf in wanted:
            leaf.requires_grad_()
        return list(
            torch.autograd.grad(compute(leaves[0], case.offsets_L, *leaves[1:]), wanted, case.grad_y_RD)
        )

    assert all(map(torch.equal, gradients(in_a_graph(plugin)), gradients(plugin)))


@pytest.mark.parametrize("name", OPERATORS)
def test_under_autocast_and_without_gradients_a_graph_gives_the_same(name: str):
    case = make_case((40, 0, 24), num_padding_rows=2)
    plugin = build_compute(name, case)
    compiled = in_a_graph(plugin)
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = replace(case, grad_y_RD=case.grad_y_RD.bfloat16())
        expected, found = outputs_and_gradients(plugin, in_bf16), outputs_and_gradients(compiled, in_bf16)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    operands = (case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)
    for without_gradients in (torch.no_grad(), torch.inference_mode()):
        with without_gradients:
            assert torch.equal(compiled(*operands), plugin(*operands))


class Layers(nn.Module):
    """Experts one after the other, each compiled as `memory.compile_layers` does."""

    def __init__(self, name: str, case: Case, number: int) -> None:
        super().__init__()
        num_experts, intermediate_size, hidden_size = case.up_LFD.shape
        self.experts = nn.ModuleList(
            Experts(num_experts, hidden_size, intermediate_size, build_compute(name, case))
            for _ in range(number)
        )
        for layer in self.experts:
            layer.init_weights(0.1)

    def compile_layers(self, backend: Any = BACKEND) -> Layers:
        torch.compiler.reset()
        for layer in self.experts:
            layer.compile(fullgraph=True, backend=backend)
        return self

    def gradients(self, case: Case) -> list[Tensor]:
        y_RD = x_RD = case.x_RD.clone().requires_grad_()
        for layer in self.experts:
            y_RD = y_RD + layer(y_RD, case.offsets_L)
        return [y_RD.detach(), *torch.autograd.grad(y_RD, [x_RD, *self.parameters()], case.grad_y_RD)]


@pytest.mark.parametrize("name", OPERATORS)
def test_all_layers_share_a_graph_and_so_do_copies_of_the_model(name: str):
    cases = [make_case(counts) for counts in ((40, 0, 24), (0, 0, 64))]
    model = Layers(name, cases[0], 6)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    compiled = copy.deepcopy(model).compile_layers(backend)
    for case in cases:
        assert all(map(torch.equal, compiled.gradients(case), model.gradients(case)))
    # the first layer's input is a leaf, whose `grad` dynamo looks at
    assert len(graphs) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1.5)
        expected = other.gradients(cases[0])
        for layer in other.experts:
            layer.compile(fullgraph=True, backend=backend)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert all(map(torch.equal, other.gradients(cases[0]), expected))


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_weights_are_quantized_once_a_step_and_the_step_is_seen(
    name: str, is_recomputed: bool, is_compiled: bool
):
    case = make_case((40, 0, 24))
    model = Layers(name, case, 1)
    experts: Any = model.experts[0]
    made = []
    mlp = experts.compute.experts.mlp
    store = type(mlp).store

    def forward(x_RD: Tensor) -> Tensor:
        if not is_recomputed:
            return experts(x_RD, case.offsets_L)
        return checkpoint(experts, x_RD, case.offsets_L, use_reentrant=False)

    def count(self: Any, *inputs: Any) -> Any:
        made.append(inputs)
        return store(self, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(mlp), "store", count)
        if is_compiled:
            model.compile_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            # two micro-batches, both forwards first
            outputs = [forward(case.x_RD.clone().requires_grad_()) for _ in range(2)]
            for output in outputs:
                output.backward(case.grad_y_RD)
            assert len(made) == step + 1
            fresh = build_compute(name, case)
            weights = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
            for _ in range(2):
                fresh(case.x_RD, case.offsets_L, *weights).backward(case.grad_y_RD)
            made.pop()
            gradients = [weight.grad for weight in (*model.parameters(), *weights)]
            assert all(map(torch.equal, gradients[:3], gradients[3:]))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_backward_of_a_graph_may_outlive_the_layer(name: str):
    case = make_case((40, 0, 24))
    case.x_RD.requires_grad_()
    operands = (case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)
    expected = outputs_and_gradients(build_compute(name, case), case)["x_RD"]
    y_RD = in_a_graph(build_compute(name, case))(*operands)
    # it holds the plugin
    torch.compiler.reset()
    gc.collect()
    y_RD.backward(case.grad_y_RD)
    assert case.x_RD.grad is not None
    assert torch.equal(case.x_RD.grad, expected)


def test_an_activation_without_a_derivative_is_refused_in_a_graph():
    case = make_case((3, 2))
    for name in ("native", "fp8"):
        with pytest.raises(Exception, match="hidden_act=mish cannot be compiled"):
            outputs_and_gradients(in_a_graph(build_compute(name, case, "mish")), case)
