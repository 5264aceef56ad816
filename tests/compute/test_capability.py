"""A choice that cannot run is refused with every reason, before anything is built, and changes nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from afmoe.config import AfmoeConfig
from afmoe.errors import MachineError
from afmoe.hardware import Hardware
from afmoe.model import AfmoeForCausalLM
from afmoe.model_plugins import check_plugins

SMALL = AfmoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_dense_layers=1,
    num_attention_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
)
CPU = Hardware(device_type="cpu")
VOLTA = Hardware(device_type="cuda", name="V100", capability=(7, 0), has_triton=True)
HOPPER_WITHOUT_TRITON = Hardware(device_type="cuda", name="H200", capability=(9, 0))
REFUSED = [
    ("native", VOLTA, "sm_70; use moe/compute=reference"),
    ("bf16", VOLTA, "sm_70; use moe/compute=reference"),
    ("fp8", VOLTA, "sm_70; use moe/compute=bf16"),
    ("fp8", HOPPER_WITHOUT_TRITON, "needs the package triton"),
    ("mxfp8", HOPPER_WITHOUT_TRITON, "sm_100 or newer, this one is sm_90, and the package triton"),
    ({"name": "mxfp8", "emulate": False}, CPU, "this is a CPU; use moe.compute.emulate=auto"),
    ("deepgemm_fp8", CPU, "this is cpu, and the package deep_gemm.*multiple of 128, it is 32"),
]
each_refusal = pytest.mark.parametrize(("compute", "hardware", "reason"), REFUSED, ids=str)


class CountOperators(TorchDispatchMode):
    """Every operator that makes or changes a tensor passes here."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def process_state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random": torch.get_rng_state().tolist(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "flags": (torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled),
    }


@each_refusal
def test_a_refused_choice_makes_no_tensor_and_changes_no_state(
    compute: Any, hardware: Hardware, reason: str
) -> None:
    before = process_state()
    with CountOperators() as operators, pytest.raises(MachineError, match=reason):
        AfmoeForCausalLM(SMALL, attention="reference", compute=compute, hardware=hardware)
    assert operators.count == 0
    assert process_state() == before


def test_the_counter_sees_a_model_that_is_built() -> None:
    with CountOperators() as operators:
        AfmoeForCausalLM(SMALL, hardware=CPU)
    assert operators.count > 20


@each_refusal
def test_a_model_that_is_there_is_left_alone(compute: Any, hardware: Hardware, reason: str) -> None:
    model = AfmoeForCausalLM(SMALL, hardware=CPU)
    plugins = [module for module in model.modules() if hasattr(module, "compute")]
    before = {name: (id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(MachineError, match=reason):
        check_plugins(SMALL, "reference", compute, hardware)
    after = {name: (id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    assert after == before
    assert [module for module in model.modules() if hasattr(module, "compute")] == plugins
    ids = torch.randint(64, (1, 8))
    assert model(ids, labels=ids).loss.isfinite()


def test_every_reason_is_named_at_once() -> None:
    with pytest.raises(MachineError) as caught:
        check_plugins(SMALL, "flash", "fp8", VOLTA)
    text = str(caught.value)
    assert "attention=flash" in text
    assert "sm_80" in text
    assert "moe/compute=fp8" in text
    assert "sm_89" in text
    assert text.count("; use ") == 2


def test_every_rank_decides_from_its_own_record() -> None:
    """One node of four is older: its ranks refuse, before any of them waits for the others."""
    verdicts = []
    for capability in ((9, 0), (9, 0), (8, 0), (9, 0)):
        hardware = Hardware(device_type="cuda", capability=capability, has_triton=True)
        try:
            check_plugins(SMALL, "reference", "fp8", hardware)
            verdicts.append("runs")
        except MachineError as error:
            verdicts.append(str(error))
    assert verdicts[:2] == ["runs", "runs"]
    assert "needs a GPU of sm_89 or newer, this one is sm_80" in verdicts[2]
