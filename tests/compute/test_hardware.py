"""What each compute plugin says about hardware that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import CPU

from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware, detect_hardware
from afmoe.moe.compute import ExpertShape, check_compute
from afmoe.registry import build, configure, find

SHAPE = ExpertShape(num_experts=128, hidden_size=2048, intermediate_size=1024, activation="silu")


def gpu(major: int, minor: int, has_triton: bool = True) -> Hardware:
    return Hardware(
        device_type="cuda", name="GPU", capability=(major, minor), num_devices=8, has_triton=has_triton
    )


@pytest.mark.parametrize(
    ("choice", "hardware", "reason"),
    [
        ("reference", CPU, None),
        ("reference", gpu(7, 0), None),
        ("native", CPU, None),
        ("native", gpu(9, 0), None),
        ("native", gpu(7, 5), "needs a GPU of sm_80 or newer.*this one is sm_75; use moe/compute=reference"),
        ("bf16", CPU, None),
        ("bf16", gpu(8, 0), None),
        ("bf16", gpu(7, 0), "needs a GPU of sm_80 or newer, this one is sm_70; use moe/compute=reference"),
        ("fp8", CPU, None),
        ({"name": "fp8", "emulate": True}, CPU, None),
        ({"name": "fp8", "emulate": True}, gpu(9, 0), None),
        ({"name": "fp8", "emulate": False}, CPU, "this is a CPU; use moe.compute.emulate=auto"),
        ("fp8", gpu(8, 9), None),
        ("fp8", gpu(9, 0), None),
        ({"name": "fp8", "emulate": False}, gpu(10, 0), None),
        ("fp8", gpu(8, 0), "needs a GPU of sm_89 or newer, this one is sm_80; use moe/compute=bf16"),
        (
            "fp8",
            gpu(8, 6, has_triton=False),
            "a GPU of sm_89 or newer, this one is sm_86, and the package triton, which is not installed",
        ),
        ("mxfp8", CPU, None),
        ({"name": "mxfp8", "emulate": True}, gpu(9, 0), None),
        ({"name": "mxfp8", "emulate": False}, CPU, "this is a CPU; use moe.compute.emulate=auto"),
        ("mxfp8", gpu(10, 0), None),
        ("mxfp8", gpu(9, 0), "needs a GPU of sm_100 or newer, this one is sm_90; use moe/compute=bf16, or"),
        ({"name": "bf16", "kernels": "triton"}, gpu(8, 0), None),
        (
            {"name": "bf16", "kernels": "triton"},
            CPU,
            "needs a GPU, this is a CPU; use moe.compute.kernels=torch",
        ),
        ({"name": "bf16", "kernels": "triton"}, gpu(9, 0, has_triton=False), "needs the package triton"),
    ],
    ids=str,
)
def test_a_plugin_runs_there_or_says_why_not_and_what_would(
    choice: Any, hardware: Hardware, reason: str | None
) -> None:
    config = configure("moe/compute", choice)
    plugin: Any = find("moe/compute", choice if isinstance(choice, str) else choice["name"])
    if reason is None:
        check_compute(plugin, config, hardware=hardware, shape=SHAPE)
        assert plugin.why_not(config, hardware=hardware, shape=SHAPE) is None
    else:
        with pytest.raises(MachineError, match=reason):
            check_compute(plugin, config, hardware=hardware, shape=SHAPE)


def test_bf16_refuses_kernels_that_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"moe.compute.kernels must be torch or triton, got cuda"):
        configure("moe/compute", {"name": "bf16", "kernels": "cuda"})


def built(choice: Any, hardware: Hardware) -> Any:
    return build(configure("moe/compute", choice), hardware=hardware, shape=SHAPE)


def test_the_bf16_kernels_multiply_experts_without_a_gate_and_refuse_biases() -> None:
    config = configure("moe/compute", {"name": "bf16", "kernels": "triton"})
    plugin: Any = find("moe/compute", "bf16")
    assert plugin.why_not(config, hardware=gpu(9, 0), shape=replace(SHAPE, gated=False)) is None
    reason = plugin.why_not(config, hardware=gpu(9, 0), shape=replace(SHAPE, has_bias=True))
    assert reason.endswith("these have biases; use moe.compute.kernels=torch")


def test_a_plugin_for_kernels_says_so() -> None:
    assert built("fp8", gpu(9, 0)).description == "fp8 (e4m3, Triton kernels)"
    fp8_on_request = built({"name": "fp8", "emulate": True}, gpu(9, 0))
    assert fp8_on_request.description == "fp8 (e4m3, emulated on cuda)"
    bf16 = built({"name": "bf16", "kernels": "triton"}, gpu(9, 0))
    assert bf16.description == "bf16 (operands cast to bf16, triton kernels)"


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("fp8", "scales", "fp16", r"moe.compute.scales must be one of fp32, ue8m0, got fp16"),
        ("fp8", "wgrad", "mxfp8", r"moe.compute.wgrad must be one of fp8, bf16, got mxfp8"),
        ("fp8", "emulate", "maybe", r"moe.compute.emulate must be one of auto, true, false, got maybe"),
        ("mxfp8", "wgrad", "fp8", r"moe.compute.wgrad must be one of mxfp8, bf16, got fp8"),
        ("mxfp8", "scales", "ue8m0", r"moe/compute=mxfp8 has no option `scales`; it has: "),
    ],
)
def test_quantized_plugins_refuse_values_that_they_do_not_know(
    name: str, option: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure("moe/compute", {"name": name, option: value})


def test_detected_hardware_describes_this_machine() -> None:
    hardware = detect_hardware("cpu")
    assert (hardware.device_type, hardware.capability, hardware.is_cuda) == ("cpu", None, False)
    assert hardware.memory_gib > 0.1
    assert hardware.architecture == "cpu"
    assert detect_hardware("auto").is_cuda == torch.cuda.is_available()


def test_hardware_detection_refuses_accelerators_that_are_unknown_or_absent() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.accelerator must be one of auto, cpu, gpu, cuda, got tpu"
    ):
        detect_hardware("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match=r"sees no CUDA GPU; use trainer\.accelerator=cpu"):
            detect_hardware("gpu")
