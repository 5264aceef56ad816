"""Every kernel compiles for GPUs that are not here, to the instructions that it is written for."""

from __future__ import annotations

from typing import Any

import pytest
from own_process import printed_json, skip_without_triton

pytestmark = pytest.mark.slow

SIZES = "256x384"
# hidden and intermediate size that 16 does not divide: operands are padded, so the kernels are as good
ODD_SIZES = "200x72"
# tensor-core instruction of the products, and KiB of shared memory that one program may use
CASES = [
    ("bf16", 80, "HMMA", 163),
    ("bf16", 90, "HGMMA", 227),
    ("bf16", 100, "UTCHMMA", 227),
    ("fp8", 89, "QMMA", 99),
    ("fp8", 90, "QGMMA", 227),
    ("fp8", 100, "UTCQMMA", 227),
    ("fp8-ue8m0", 100, "UTCQMMA", 227),
    ("mxfp8", 100, "UTCQMMA", 227),
]
each_case = pytest.mark.parametrize(
    ("name", "architecture", "instruction", "shared_memory_kib"),
    CASES,
    ids=[f"{name}-sm_{architecture}" for name, architecture, _, _ in CASES],
)


@pytest.fixture(autouse=True)
def triton() -> None:
    skip_without_triton()


def compiled(name: str, architecture: int) -> list[dict[str, Any]]:
    sizes = [SIZES, ODD_SIZES] if (name, architecture) == ("bf16", 90) else [SIZES]
    return printed_json("ahead_of_time.py", name, str(architecture), *sizes, interpret=False)


@each_case
def test_products_use_the_tensor_cores_and_copy_asynchronously(
    name: str, architecture: int, instruction: str, shared_memory_kib: int
) -> None:
    products = [
        row
        for row in compiled(name, architecture)
        if row["kernel"].startswith(("multiply", "weight_gradient"))
    ]
    # forward, input gradient of one and of two weights, weight gradient; equal ones are compiled once
    assert len(products) >= 3
    for row in products:
        # bf16 goes through both pairs in one loop
        num_loops = 2 if "2 pairs" in row["kernel"] and name != "bf16" else 1
        instructions = row["instructions"]
        assert instructions.get(instruction, 0) >= 4 * num_loops, row
        # 256 threads copy 16 bytes each, 8 times for the two 16 KiB tiles of a stage. sm_80 has no product
        # that reads a transposed tile from shared memory, so weight gradients copy one tile of two this way
        num_stages = row["num_stages"] if architecture > 80 else 2
        assert instructions.get("LDGSTS", 0) >= 8 * num_stages * num_loops, row
        assert row["is_block_scaled"] == (name == "mxfp8"), row


@each_case
def test_nothing_spills_and_everything_fits(
    name: str, architecture: int, instruction: str, shared_memory_kib: int, capsys: pytest.CaptureFixture
) -> None:
    rows = compiled(name, architecture)
    with capsys.disabled():
        print("\n" + table(rows))
    for row in rows:
        assert row["stack"] == 0, row
        assert "LDL" not in row["instructions"], row
        assert "STL" not in row["instructions"], row
        assert row["shared_memory_kib"] <= shared_memory_kib, row


@pytest.mark.parametrize("architecture", [90, 100])
def test_two_programs_of_bf16_products_fit_on_a_multiprocessor(architecture: int) -> None:
    rows = [row for row in compiled("bf16", architecture) if row["kernel"] != "layout"]
    for row in rows:
        # of both GPUs: 65,536 registers and 228 KiB of shared memory, 1 KiB of it kept back for each program
        assert 2 * row["registers"] * 32 * row["num_warps"] <= 65_536, row
        assert 2 * (row["shared_memory_kib"] + 1) <= 228, row


def test_the_reading_of_machine_code_sees_spills() -> None:
    (row,) = printed_json("ahead_of_time.py", "spilling", "90", interpret=False)
    assert row["stack"] > 0
    assert row["instructions"]["LDL"] > 0
    assert row["instructions"]["STL"] > 0


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "format     GPU     sizes    kernel                             registers  shared KiB  instructions"
    ]
    for row in rows:
        sizes = "x".join(map(str, row["sizes"]))
        instructions = " ".join(f"{name}:{count}" for name, count in sorted(row["instructions"].items()))
        lines.append(
            f"{row['format']:10s} sm_{row['architecture']:<4d} {sizes:8s} {row['kernel']:34s} "
            f"{row['registers']:9d}  {row['shared_memory_kib']:10.0f}  {instructions}"
        )
    return "\n".join(lines)
