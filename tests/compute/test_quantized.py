"""`moe/compute=fp8` and `mxfp8` against their written contract, and their copies of the weights."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import (
    COUNTS,
    Case,
    build_compute,
    deviation,
    make_case,
    needs_compiler,
    outputs_and_gradients,
)
from torch import Tensor

from afmoe.moe.activations import activation_named
from afmoe.moe.compute import cpu_choice
from afmoe.moe.cpu_kernels.kernels import cpu_kernels
from afmoe.moe.grouped_mm import CompiledProducts, ExpertWeights, RunProducts, Segments, TorchProducts
from afmoe.moe.quantization import (
    BLOCK_SIZE,
    MX_BLOCK_SIZE,
    dequantize_columns,
    dequantize_mx_weights,
    dequantize_rows,
    dequantize_weights,
    quantize_columns,
    quantize_mx_weights,
    quantize_rows,
    quantize_weights,
)

# fp32 sums; measured up to 4.2e-7
CONTRACT = 1e-6

FORMATS = ["fp8", "mxfp8"]
each_format = pytest.mark.parametrize("name", FORMATS)
each_way = pytest.mark.parametrize("compiled", ["false", pytest.param("true", marks=needs_compiler)])


def contract(
    case: Case, options: dict[str, str], activation: str = "silu", products: RunProducts | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients as `afmoe.moe.quantization` defines them.

    What is quantized again on the way (hidden rows and their gradients) is computed in fp32, by the same
    calls as the plugin's: another rounding of a sum could move a value across the border of two codes. The
    last product of each result is in fp64. `products`: the plugin's, None: torch's.
    """
    products = products or TorchProducts()
    end, rows = case.num_rows, slice(0, case.num_rows)
    is_mx = options["name"] == "mxfp8"
    scales, block_size = ("ue8m0", MX_BLOCK_SIZE) if is_mx else (options["scales"], BLOCK_SIZE)
    weights = (case.gate_LFD, case.up_LFD, case.down_LDF)
    if is_mx:
        gate, up, down = (dequantize_mx_weights(*quantize_mx_weights(w, 2), 2) for w in weights)
        gate_dx, up_dx, down_dx = (dequantize_mx_weights(*quantize_mx_weights(w, 1), 1) for w in weights)
    else:
        gate, up, down = (dequantize_weights(*quantize_weights(w, scales)) for w in weights)
        gate_dx, up_dx, down_dx = gate, up, down

    def quantized(rows_RK: Tensor) -> Tensor:
        return dequantize_rows(*quantize_rows(rows_RK, scales, block_size), block_size)

    def per_expert(x_RK: Tensor, w_LNK: Tensor) -> Tensor:
        if x_RK.dtype == torch.float32:
            segments = Segments.of(case.offsets_L, num_experts=len(w_LNK), num_rows=end)
            (run,) = segments.runs(max_rows=end)
            out_RN = x_RK.new_empty(end, w_LNK.shape[1])
            products.multiply(x_RK, w_LNK.transpose(1, 2), run, out_RN=out_RN)
            return out_RN
        parts = x_RK.split(case.counts)
        return torch.cat([part @ w_NK.t() for part, w_NK in zip(parts, w_LNK, strict=True)])

    def weight_gradient(grad_RN: Tensor, x_RK: Tensor) -> Tensor:
        if options["wgrad"] == "bf16":
            grad_RN, x_RK = grad_RN.bfloat16(), x_RK.bfloat16()
        else:
            grad_RN, x_RK = (
                dequantize_columns(
                    *quantize_columns(operand, case.offsets_L, scales, block_size), case.offsets_L, block_size
                )
                for operand in (grad_RN, x_RK)
            )
        parts = zip(grad_RN.double().split(case.counts), x_RK.double().split(case.counts), strict=True)
        return torch.stack([grad_MN.t() @ x_MK for grad_MN, x_MK in parts])

    x_RD, grad_y_RD = case.x_RD[rows], case.grad_y_RD[rows]
    gated_RF = per_expert(quantized(x_RD), gate).requires_grad_()
    raised_RF = per_expert(quantized(x_RD), up).requires_grad_()
    hidden_RF = activation_named(activation).hidden(gated_RF, raised_RF)
    y_RD = per_expert(quantized(hidden_RF.detach()).double(), down.double())
    grad_hidden_RF = per_expert(quantized(grad_y_RD), down_dx.transpose(1, 2))
    grad_gated_RF, grad_raised_RF = torch.autograd.grad(hidden_RF, [gated_RF, raised_RF], grad_hidden_RF)
    grad_x_RD = per_expert(quantized(grad_gated_RF).double(), gate_dx.transpose(1, 2).double())
    grad_x_RD += per_expert(quantized(grad_raised_RF).double(), up_dx.transpose(1, 2).double())
    padding = [0, 0, 0, case.x_RD.shape[0] - end]
    return {
        "y_RD": torch.nn.functional.pad(y_RD, padding),
        "x_RD": torch.nn.functional.pad(grad_x_RD, padding),
        "gate_LFD": weight_gradient(grad_gated_RF, x_RD),
        "up_LFD": weight_gradient(grad_raised_RF, x_RD),
        "down_LDF": weight_gradient(grad_y_RD, hidden_RF.detach()),
    }


@each_way
@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        *((counts, sizes) for counts in COUNTS[:3] for sizes in ((64, 48), (128, 256), (200, 136))),
        # more rows than the emulation works on at a time, in one expert and in several
        ((300, 700, 0, 129, 100), (256, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        *(
            {"name": "fp8", "scales": scales, "wgrad": wgrad}
            for scales in ("fp32", "ue8m0")
            for wgrad in ("fp8", "bf16")
        ),
        {"name": "mxfp8", "wgrad": "mxfp8"},
        {"name": "mxfp8", "wgrad": "bf16"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_outputs_and_gradients_equal_the_contract(
    counts: tuple[int, ...], sizes: tuple[int, int], options: dict[str, str], compiled: str
) -> None:
    case = make_case(counts, num_padding_rows=7, hidden_size=sizes[0], intermediate_size=sizes[1])
    products = CompiledProducts(cpu_kernels()) if compiled == "true" else TorchProducts()
    expected = contract(case, options, products=products)
    actual = outputs_and_gradients(build_compute({**options, "compiled": compiled}, case), case)
    for key, value in actual.items():
        assert deviation(value, expected[key]) <= CONTRACT, key


@each_format
def test_a_clamped_activation_is_part_of_the_contract(name: str) -> None:
    case = make_case(COUNTS[0], num_padding_rows=7)
    options = {"name": name, "scales": "fp32", "wgrad": name}
    expected = contract(case, options, "clamped_swiglu:0.5")
    actual = outputs_and_gradients(build_compute(name, case, "clamped_swiglu:0.5"), case)
    unbounded = contract(case, options)
    for key, value in actual.items():
        assert deviation(value, expected[key]) <= CONTRACT, key
        assert deviation(unbounded[key], expected[key]) > 0.5, key


@each_format
def test_every_result_carries_the_rounding_error_of_e4m3(name: str) -> None:
    case = make_case(COUNTS[0], num_padding_rows=7)
    expected = outputs_and_gradients(build_compute("reference", case), case.to(torch.float64))
    actual = outputs_and_gradients(build_compute(name, case), case)
    for key, value in actual.items():
        # three products in a row, 3.7e-2 each: measured 6.3e-2 to 6.7e-2; unquantized it would be 4e-7
        assert 1e-2 <= deviation(value, expected[key]) <= 2e-1, key


@each_format
def test_bf16_weight_gradients_are_nearer_to_exact_ones(name: str) -> None:
    case = make_case(COUNTS[1])
    expected = outputs_and_gradients(build_compute("reference", case), case.to(torch.float64))
    quantized, in_bf16 = (
        outputs_and_gradients(build_compute({"name": name, "wgrad": wgrad}, case), case)
        for wgrad in (name, "bf16")
    )
    assert torch.equal(quantized["x_RD"], in_bf16["x_RD"])
    for key in ("gate_LFD", "up_LFD", "down_LDF"):
        assert deviation(in_bf16[key], expected[key]) < 0.9 * deviation(quantized[key], expected[key]), key


def forward(compute: Any, case: Case) -> Tensor:
    return compute(case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)


def copies(compute: Any, case: Case) -> list[Tensor]:
    experts, weights = compute.experts, (case.gate_LFD, case.up_LFD, case.down_LDF)
    pairs = experts.weight_copies.of(weights, lambda: experts.mlp.store(ExpertWeights(*weights)))
    return [copy for pair in pairs for copy in pair]


@each_format
def test_weights_are_quantized_once_until_told_that_they_changed(name: str) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    forward(compute, case)
    first = copies(compute, case)
    forward(compute, case)
    assert all(a is b for a, b in zip(first, copies(compute, case), strict=True))
    compute.on_weights_updated()
    assert not any(a is b for a, b in zip(first, copies(compute, case), strict=True))


@each_format
def test_an_optimizer_step_is_seen_without_being_told(name: str) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    weights = [torch.nn.Parameter(w) for w in (case.gate_LFD, case.up_LFD, case.down_LDF)]
    compute(case.x_RD, case.offsets_L, *weights).sum().backward()
    torch.optim.AdamW(weights, lr=0.1).step()
    fresh = build_compute(name, case)
    assert torch.equal(
        compute(case.x_RD, case.offsets_L, *weights), fresh(case.x_RD, case.offsets_L, *weights)
    )


@each_format
def test_a_write_through_data_is_seen_after_the_hook_and_always_without_gradients(name: str) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    before = forward(compute, case)
    case.down_LDF.data.mul_(2.0)
    with torch.no_grad():
        assert torch.equal(forward(compute, case), 2.0 * before)
    # such a write leaves no trace: this is what the hook is for
    assert torch.equal(forward(compute, case), before)
    compute.on_weights_updated()
    assert torch.equal(forward(compute, case), 2.0 * before)


@each_format
def test_other_weights_are_never_taken_for_the_cached_ones(name: str) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    for factor in (1.0, 2.0, 3.0):
        # a fresh tensor a call, which may lie where the last one lay, with the same version counter
        down_LDF = case.down_LDF * factor
        y_RD = compute(case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, down_LDF)
        fresh = build_compute(name, case)
        assert torch.equal(y_RD, fresh(case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, down_LDF))
        del down_LDF


@each_format
def test_copies_that_were_made_while_the_weights_changed_are_not_used_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    mlp = type(compute.experts.mlp)
    store = mlp.store

    def store_and_change(self: Any, *inputs: Any) -> Any:
        # as another thread would
        stored = store(self, *inputs)
        case.down_LDF.data.mul_(2.0)
        compute.on_weights_updated()
        return stored

    before = forward(build_compute(name, case), case)
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "store", store_and_change)
        assert torch.equal(forward(compute, case), before)
    assert torch.equal(forward(compute, case), 2.0 * before)


@each_format
def test_two_forwards_before_their_backwards_each_get_the_gradients_of_their_weights(name: str) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    other = replace(case, down_LDF=case.down_LDF.flip(0))
    leaves = [each.x_RD.clone().requires_grad_() for each in (case, other)]
    outputs = [
        compute(leaf, each.offsets_L, each.gate_LFD, each.up_LFD, each.down_LDF)
        for leaf, each in zip(leaves, (case, other), strict=True)
    ]
    for leaf, output, each in zip(leaves, outputs, (case, other), strict=True):
        (gradient,) = torch.autograd.grad(output, leaf, case.grad_y_RD)
        assert torch.equal(gradient, outputs_and_gradients(build_compute(name, each), each)["x_RD"])


@each_format
def test_it_runs_in_inference_mode_and_gives_the_same_without_gradients(name: str) -> None:
    case = make_case((40, 0, 24), num_padding_rows=3)
    compute = build_compute(name, case)
    expected = forward(compute, case)
    with torch.inference_mode():
        assert torch.equal(forward(compute, case), expected)
        inference_case = case.to(torch.float64).to(torch.float32)
        assert torch.equal(forward(compute, inference_case), expected)
    with torch.no_grad():
        assert torch.equal(forward(compute, case), expected)


@each_format
def test_a_copied_or_pickled_plugin_works_and_starts_without_a_cache(name: str) -> None:
    case = make_case((40, 0, 24))
    compute = build_compute(name, case)
    expected = forward(compute, case)
    for other in (copy.deepcopy(compute), pickle.loads(pickle.dumps(compute))):
        assert other.experts.weight_copies is not compute.experts.weight_copies
        assert torch.equal(forward(other, case), expected)


@each_format
def test_the_emulation_is_announced_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    cpu_choice.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            compute = build_compute(name, make_case((1,)))
    assert [record.message for record in caplog.records] == [
        f"moe/compute={name} runs as exact emulation on cpu: {name}'s numbers, not its speed"
    ]
    assert compute.description == f"{name} (e4m3, emulated on cpu)"


@each_format
def test_the_default_dtype_of_torch_changes_nothing(name: str) -> None:
    case = make_case(COUNTS[0], num_padding_rows=3)
    expected = outputs_and_gradients(build_compute(name, case), case)
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = outputs_and_gradients(build_compute(name, case), case)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(actual[key], expected[key]) for key in actual)
