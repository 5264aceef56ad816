"""How many operations a second a device could do at best: what `train/mfu` is measured against.

GPUs: the makers' data sheets, dense (a sheet's figure with sparsity is halved), products of bf16 or fp16
accumulated in fp32. A CPU has no such sheet: a square product is timed in this process, with its threads.
"""

from __future__ import annotations

import functools
import re
import time
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Operations per second, in units of 1e12."""

    half: float
    """bf16 and fp16."""
    tf32: float
    fp32: float


# By words of the product name as CUDA reports it; the first entry counts of which all words are there. From
# NVIDIA's data sheet of the product, or its architecture's white paper (GA102, AD102, GB202).
_PEAKS: list[tuple[str, Peak]] = [
    ("gb300", Peak(2500, 1250, 80)),
    ("b300", Peak(2250, 1125, 76)),
    ("gb200", Peak(2500, 1250, 80)),
    ("b200", Peak(2250, 1125, 75)),
    ("h200 nvl", Peak(835.5, 417.5, 60)),
    ("gh200", Peak(989.4, 494.7, 66.9)),
    ("h200", Peak(989.4, 494.7, 66.9)),
    ("h100 nvl", Peak(835.5, 417.5, 60)),
    ("h100 pcie", Peak(756, 378, 51.2)),
    ("h100", Peak(989.4, 494.7, 66.9)),
    ("h800", Peak(989.4, 494.7, 66.9)),
    ("h20", Peak(148, 74, 44)),
    ("a100", Peak(312, 156, 19.5)),
    ("a800", Peak(312, 156, 19.5)),
    ("a30", Peak(165, 82, 10.3)),
    ("a40", Peak(149.7, 74.8, 37.4)),
    ("a10g", Peak(70, 35, 31.2)),
    ("a10", Peak(125, 62.5, 31.2)),
    ("l40s", Peak(362, 183, 91.6)),
    ("l40", Peak(181, 90.5, 90.5)),
    ("l4", Peak(121, 60, 30.3)),
    ("rtx 6000 ada", Peak(364.2, 182.1, 91.1)),
    ("rtx a6000", Peak(154.8, 77.4, 38.7)),
    ("rtx 5090", Peak(209.5, 104.8, 104.8)),
    ("rtx 4090", Peak(165.2, 82.6, 82.6)),
    ("rtx 3090", Peak(71, 35.6, 35.6)),
]
_SMALL, _LARGE = 256, 1024
_MEASURED_SECONDS = 0.15


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second that `device` could do in products of `dtype`; None: nobody knows."""
    if device.type == "cpu":
        return measured_flops(dtype, torch.get_num_threads())
    if device.type != "cuda":
        return None
    return gpu_peak_flops(torch.cuda.get_device_name(device), dtype)


def gpu_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """The data sheet's figure by product name; fp32 counts as TF32 where torch is allowed to use that."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    for wanted, peak in _PEAKS:
        if words >= set(wanted.split()):
            if dtype in (torch.bfloat16, torch.float16):
                return peak.half * 1e12
            if dtype == torch.float32:
                is_tf32 = torch.get_float32_matmul_precision() != "highest"
                return (peak.tf32 if is_tf32 else peak.fp32) * 1e12
            return None
    return None


@functools.cache
def measured_flops(dtype: torch.dtype, num_threads: int) -> float:
    """The best rate of a square product on this CPU, with that many threads; once a process, in less than a
    second.
    """
    _rate(_SMALL, dtype)
    best = _rate(_SMALL, dtype)
    # a CPU that emulates the dtype would take seconds for the large one
    size = _LARGE if 2 * _LARGE**3 / best < 2 * _MEASURED_SECONDS else _SMALL
    start = time.perf_counter()
    while time.perf_counter() - start < _MEASURED_SECONDS:
        best = max(best, _rate(size, dtype))
    return best


def _rate(size: int, dtype: torch.dtype) -> float:
    square = torch.ones(size, size, dtype=dtype)
    start = time.perf_counter()
    torch.mm(square, square)
    return 2 * size**3 / (time.perf_counter() - start)
