"""`moe/compute=deepgemm_fp8` without a GPU: its layouts, and its layer on a stand-in for DeepGEMM.

The stand-in follows what DeepGEMM's own tests feed and expect (tests/generators.py, csrc/apis/gemm.hpp): it
checks shapes, dtypes and alignment, restores the operands and multiplies in fp32.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from expert_cases import COUNTS, Case, build_compute, deviation, make_case, outputs_and_gradients
from torch import Tensor

from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.compute import ExpertShape, check_compute
from afmoe.moe.compute.deepgemm_layout import AlignedRows
from afmoe.moe.quantization import BLOCK_SIZE, dequantize_rows, dequantize_weights
from afmoe.registry import build, configure, find

SIZES = {"hidden_size": 256, "intermediate_size": 128}
# bf16 products, and a sum of two of them where the emulation adds in fp32; measured 3.3e-3
TOLERANCE = 1.1e-2


def gpu(major: int, minor: int, has_deep_gemm: bool = True) -> Hardware:
    return Hardware(device_type="cuda", capability=(major, minor), has_deep_gemm=has_deep_gemm)


def m_grouped(a: Any, b: Any, d: Tensor, m_indices: Tensor) -> None:
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    num_groups, size_n, size_k = b_codes.shape
    assert a_codes.dtype == b_codes.dtype == torch.float8_e4m3fn
    assert d.dtype == torch.bfloat16
    assert m_indices.dtype == torch.int32
    assert all(t.is_contiguous() for t in (a_codes, a_scale, b_codes, b_scale, d, m_indices))
    assert a_scale.shape == (len(a_codes), size_k // BLOCK_SIZE)
    assert b_scale.shape == (num_groups, size_n // BLOCK_SIZE, size_k // BLOCK_SIZE)
    assert m_indices.shape == (len(a_codes),)
    rows, weights = dequantize_rows(a_codes, a_scale), dequantize_weights(b_codes, b_scale)
    for tile in m_indices.split(BLOCK_SIZE):
        assert tile.shape == (BLOCK_SIZE,)
        assert tile.unique().numel() == 1
    for group in range(num_groups):
        d[m_indices == group] = (rows[m_indices == group] @ weights[group].t()).bfloat16()


def check_k_grouped(d: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor) -> None:
    assert ks_tensor.tolist() == ks
    assert ks_tensor.dtype == torch.int32
    assert all(k % BLOCK_SIZE == 0 for k in ks)
    assert d.dtype == c.dtype == torch.float32
    assert len(d) == len(ks)


def k_grouped_nt(a: Any, b: Any, d: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor) -> None:
    check_k_grouped(d, ks, ks_tensor, c)
    restored = []
    for (codes, scale), size in ((a, d.shape[1]), (b, d.shape[2])):
        assert codes.shape == (sum(ks) * size,)
        assert scale.shape == (size, sum(ks) // BLOCK_SIZE)
        parts = codes.split([k * size for k in ks])
        together = torch.cat([part.view(size, k) for part, k in zip(parts, ks, strict=True)], dim=1)
        restored.append(dequantize_rows(together, scale).split(ks, dim=1))
    for group, (left, right) in enumerate(zip(*restored, strict=True)):
        d[group] = c[group] + left @ right.t()


def k_grouped_tn(a: Any, b: Any, d: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor) -> None:
    check_k_grouped(d, ks, ks_tensor, c)
    restored = []
    for (codes, scale), size in ((a, d.shape[1]), (b, d.shape[2])):
        assert codes.shape == (sum(ks), size)
        assert scale.shape == (sum(ks) // BLOCK_SIZE, size)
        restored.append(dequantize_rows(codes.t(), scale.t()).split(ks, dim=1))
    for group, (left, right) in enumerate(zip(*restored, strict=True)):
        d[group] = c[group] + left @ right.t()


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType("deep_gemm")
    module.m_grouped_fp8_gemm_nt_contiguous = m_grouped
    module.k_grouped_fp8_gemm_nt_contiguous = k_grouped_nt
    module.k_grouped_fp8_gemm_tn_contiguous = k_grouped_tn
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


def build_deepgemm(hardware: Hardware, wgrad: str = "fp8") -> Any:
    config = configure("moe/compute", {"name": "deepgemm_fp8", "wgrad": wgrad})
    shape = replace(SHAPE, num_experts=7, **SIZES)
    return build(config, shape=shape, hardware=hardware)


def same_scales(hardware: Hardware, wgrad: str, case: Case) -> Any:
    scales = "fp32" if hardware.capability == (9, 0) else "ue8m0"
    return build_compute({"name": "fp8", "scales": scales, "wgrad": wgrad}, case)


@pytest.mark.parametrize("hardware", [gpu(9, 0), gpu(10, 0)], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_layer_agrees_with_the_emulation_of_fp8(
    deep_gemm: ModuleType, counts: tuple[int, ...], wgrad: str, hardware: Hardware
) -> None:
    case = make_case(counts, num_padding_rows=7, **SIZES).to(torch.bfloat16)
    expected = outputs_and_gradients(same_scales(hardware, wgrad, case), case)
    actual = outputs_and_gradients(build_deepgemm(hardware, wgrad), case)
    exact = outputs_and_gradients(build_compute("reference", case), case.to(torch.float64))
    for key, value in actual.items():
        assert value.dtype == torch.bfloat16, key
        assert deviation(value, expected[key]) <= TOLERANCE, key
        # measured 4.7e-2 and more; with unquantized operands it is 4.3e-3
        assert sum(counts) == 0 or deviation(value, exact[key]) >= 2e-2, key


@pytest.mark.parametrize("hardware", [gpu(9, 0), gpu(10, 0)], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_empty_experts_and_padding_rows_get_exactly_zero(
    deep_gemm: ModuleType, wgrad: str, hardware: Hardware
) -> None:
    case = make_case(COUNTS[0], num_padding_rows=5, **SIZES)
    case.x_RD[case.num_rows :] = float("nan")
    case.grad_y_RD[case.num_rows :] = float("nan")
    actual = outputs_and_gradients(build_deepgemm(hardware, wgrad), case)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in actual.values())
    for key in ("y_RD", "x_RD"):
        assert (actual[key][case.num_rows :] == 0).all(), key
    for key in ("gate_LFD", "up_LFD", "down_LDF"):
        for expert, count in enumerate(case.counts):
            assert (actual[key][expert] == 0).all() == (count == 0), (key, expert)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_in_a_compiled_graph_it_gives_the_same_bits_whatever_the_counts(
    deep_gemm: ModuleType, wgrad: str
) -> None:
    cases = [make_case(counts, **SIZES).to(torch.bfloat16) for counts in (COUNTS[0], COUNTS[0][::-1])]
    plugin = build_deepgemm(gpu(9, 0), wgrad)
    torch.compiler.reset()
    compiled = torch.compile(plugin.__call__, fullgraph=True, backend="aot_eager")
    for case, stance in zip(cases, ("default", "fail_on_recompile"), strict=True):
        expected = outputs_and_gradients(plugin, case)
        with torch.compiler.set_stance(stance):
            found = outputs_and_gradients(compiled, case)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_are_quantized_once_until_told_that_they_changed(deep_gemm: ModuleType) -> None:
    case = make_case(COUNTS[0], **SIZES)
    compute = build_deepgemm(gpu(9, 0))
    operands = (case.x_RD, case.offsets_L, case.gate_LFD, case.up_LFD, case.down_LDF)
    before = compute(*operands)
    case.down_LDF.data.mul_(2.0)
    assert torch.equal(compute(*operands), before)
    compute.on_weights_updated()
    assert torch.equal(compute(*operands), 2.0 * before)


@pytest.mark.parametrize("counts", [*COUNTS, (0, 128, 256), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("num_padding_rows", [0, 3])
def test_rows_lie_in_tiles_of_one_expert_and_come_back(
    counts: tuple[int, ...], num_padding_rows: int
) -> None:
    num_rows = sum(counts) + num_padding_rows
    offsets_L = torch.tensor(counts).cumsum(0).to(torch.int32)
    layout = AlignedRows.of(offsets_L, num_rows)
    assert len(layout.expert_of_slot_S) % BLOCK_SIZE == 0
    assert layout.num_slots_L.tolist() == [-(-count // BLOCK_SIZE) * BLOCK_SIZE for count in counts]
    for tile in layout.expert_of_slot_S.view(-1, BLOCK_SIZE):
        assert tile.unique().numel() == 1
    used = int(layout.num_slots_L.sum())
    assert (layout.expert_of_slot_S[:used] >= 0).all()
    assert (layout.expert_of_slot_S[used:] == -1).all()
    x_RK = torch.randn(num_rows, 4)
    x_SK = layout.spread(x_RK)
    expert_of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert torch.equal(x_SK.count_nonzero(), x_RK[: sum(counts)].count_nonzero())
    for expert in range(len(counts)):
        mine = x_SK[layout.expert_of_slot_S == expert]
        assert torch.equal(mine[: counts[expert]], x_RK[: sum(counts)][expert_of_row == expert])
    back = layout.gather(x_SK)
    assert torch.equal(back[: sum(counts)], x_RK[: sum(counts)])
    assert (back[sum(counts) :] == 0).all()


SHAPE = ExpertShape(num_experts=128, hidden_size=2048, intermediate_size=1024, activation="silu")


@pytest.mark.parametrize(
    ("hardware", "shape", "reason"),
    [
        (gpu(9, 0), {}, None),
        (gpu(10, 0), {}, None),
        (gpu(8, 9), {}, "needs a GPU of sm_90 or sm_100, this is sm_89; use moe/compute=fp8"),
        (gpu(12, 0), {}, "needs a GPU of sm_90 or sm_100, this is sm_120"),
        (gpu(9, 0, has_deep_gemm=False), {}, "needs the package deep_gemm .*, which is not installed"),
        (gpu(9, 0), {"hidden_size": 192}, "needs model.hidden_size to be a multiple of 128, it is 192"),
        (
            Hardware(device_type="cpu"),
            {"intermediate_size": 96},
            "a GPU of sm_90 or sm_100, this is cpu, and the package deep_gemm .*, and "
            "model.moe_intermediate_size to be a multiple of 128, it is 96; use moe/compute=fp8, or",
        ),
        (gpu(9, 0), {"has_bias": True}, "these have biases; use moe/compute=native"),
    ],
)
def test_it_runs_there_or_names_every_reason(
    hardware: Hardware, shape: dict[str, Any], reason: str | None
) -> None:
    plugin: Any = find("moe/compute", "deepgemm_fp8")
    config = configure("moe/compute", "deepgemm_fp8")
    if reason is None:
        check_compute(plugin, config, hardware=hardware, shape=replace(SHAPE, **shape))
    else:
        with pytest.raises(MachineError, match=reason):
            check_compute(plugin, config, hardware=hardware, shape=replace(SHAPE, **shape))


def test_an_unknown_format_of_weight_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"moe\.compute\.wgrad must be one of fp8, bf16, got fp32"):
        configure("moe/compute", {"name": "deepgemm_fp8", "wgrad": "fp32"})
