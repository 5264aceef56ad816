"""The kernels keep the written contract of `afmoe.moe.quantization`, in triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from own_process import printed_json, skip_without_triton

pytestmark = pytest.mark.slow

FORMATS = ["bf16", "fp8", "fp8-ue8m0", "fp8-wgrad-bf16", "mxfp8"]
# products summed in fp32 against fp64: measured 1.4e-9 to 1.2e-7, bf16 and fp8 alike
PRODUCT = 1e-6
# A whole layer against the plugin of a CPU. Sums in another order differ by 1e-7, which moves a value over
# the border between two codes, or two bf16 values, now and then: measured 9e-5 in fp32 models, 2.2e-3 in bf16
# (one rounding of the input gradient instead of three). Swapped weights or a missing scale are above 1e-1
# Against products that are not quantized: what catches a path that quantizes nothing, or something else
QUANTIZED = {"bf16": (5e-4, 2e-2), "fp8": (1e-2, 2e-1)}
LAYER = {"torch.float32": 1e-3, "torch.bfloat16": 7e-3}


@pytest.fixture(autouse=True)
def triton() -> None:
    skip_without_triton()


def figures(group: str) -> dict[str, dict[str, float]]:
    return printed_json("interpreter_checks.py", group, interpret=True)


def test_the_interpreter_has_three_faults_and_the_repair_mends_them() -> None:
    found = figures("interpreter")
    assert found["unrepaired"].keys() == found["repaired"].keys()
    assert found["unrepaired"]["bf16 dot, relative error"] > 1.0
    assert found["unrepaired"]["fp32 to bf16, wrong values"] > 100
    assert found["unrepaired"]["fp32 to e4m3, wrong values"] > 10
    assert found["repaired"]["bf16 dot, relative error"] <= 1e-6
    assert found["repaired"]["fp32 to bf16, wrong values"] == 0
    assert found["repaired"]["fp32 to e4m3, wrong values"] == 0


def test_tiles_cover_every_row_once_and_the_bound_suffices() -> None:
    layout = figures("interpreter")["layout"]
    assert len(layout) == 14
    assert wrong(layout) == {}


@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_the_contract(name: str) -> None:
    products = {key: value for key, value in figures(name)["products"].items() if not key.endswith(", wrong")}
    # four products, two sets of counts, three pairs of sizes
    assert len(products) == 24
    assert {key: value for key, value in products.items() if not value <= PRODUCT} == {}


@pytest.mark.parametrize("name", FORMATS)
def test_padding_rows_and_empty_experts_are_exactly_zero_and_nothing_leaks_from_them(name: str) -> None:
    zeros = {key: value for key, value in figures(name)["products"].items() if key.endswith(", wrong")}
    assert len(zeros) == 24
    assert wrong(zeros) == {}


@pytest.mark.parametrize("name", ["fp8", "fp8-ue8m0", "mxfp8"])
def test_quantizers_equal_the_contract_bit_for_bit(name: str) -> None:
    copies = figures(name)["quantizers"]
    # nine things stored, three pairs of sizes, two dtypes
    assert len(copies) == 54
    assert wrong(copies) == {}


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_keeps_the_contract_of_expert_compute(name: str) -> None:
    layer = dict(figures(name)["layer"])
    assert wrong(layer) == {}
    layer.pop("saved bytes a row, hidden 256, experts 128 wide")
    deviations = {key: value for key, value in layer.items() if not key.endswith(", wrong")}
    assert len(deviations) == 19
    bounds = LAYER | ({"torch.float32": LAYER["torch.bfloat16"]} if name == "bf16" else {})
    quantized = {key: deviations.pop(key) for key in list(deviations) if key.startswith("without a gate")}
    beyond = {key: value for key, value in deviations.items() if not value <= bounds[key.split()[-1]]}
    assert beyond == {}
    lowest, highest = QUANTIZED["bf16" if name == "bf16" else "fp8"]
    assert {key: value for key, value in quantized.items() if not lowest <= value <= highest} == {}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_saved_for_backward_is_what_the_page_on_gpus_says(name: str) -> None:
    hidden_size, intermediate_size = 256, 128
    # of 1,024 rows: 8 whole tiles, and two that other counts would need
    tiles_a_row = 10 / 1024
    x_bytes = {
        "bf16": 0,
        "fp8": hidden_size * (128 + 4) * tiles_a_row,
        "mxfp8": hidden_size * (128 + 4) * tiles_a_row,
        "fp8-ue8m0": hidden_size * (128 + 4) * tiles_a_row,
        "fp8-wgrad-bf16": 0,
    }[name]
    saved = figures(name)["layer"]["saved bytes a row, hidden 256, experts 128 wide"]
    assert saved == pytest.approx(x_bytes + 4 * intermediate_size)
    # x, both products, the activated gate and the hidden rows, in bf16
    plain = 2 * hidden_size + 8 * intermediate_size
    assert saved <= 0.6 * plain


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8-wgrad-bf16", "mxfp8"])
def test_a_compiled_graph_gives_the_bits_of_eager_runs_whatever_counts_and_layer(name: str) -> None:
    found = figures(f"compiled {name}")["compiled"]
    # y and four gradients of three calls, in fp32, in bf16, and with rows that are gathered again
    assert len(found) == 45
    assert wrong(found) == {}


def wrong(found: dict[str, Any]) -> dict[str, Any]:
    """Those of the counts of wrong values that are not zero."""
    return {key: value for key, value in found.items() if key.endswith(", wrong") and value != 0}
