"""A model that holds some experts of each layer is the whole one without the others."""

from __future__ import annotations

import pytest
import torch
from parity import SMALL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from afmoe import AfmoeConfig, AfmoeForCausalLM, iter_moe_blocks
from afmoe.moe.block import held_experts, hold_experts

NUM_EXPERTS = SMALL["num_experts"]
HALVES = [range(NUM_EXPERTS // 2), range(NUM_EXPERTS // 2, NUM_EXPERTS)]


def with_room_for(experts: range | None) -> AfmoeForCausalLM:
    with torch.device("meta"):
        model = AfmoeForCausalLM(AfmoeConfig(**SMALL), compute="reference")
    hold_experts(model, experts)
    return model.to_empty(device="cpu")


class MadeTensors(TorchDispatchMode):
    """Shapes of the tensors that are made, not of views."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default or func is torch.ops.aten.empty.memory_format:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("experts", [*HALVES, range(NUM_EXPERTS - 1, NUM_EXPERTS)])
def test_held_experts_are_drawn_as_they_are_among_all(experts: range) -> None:
    whole, part = with_room_for(None), with_room_for(experts)
    for model in (whole, part):
        torch.manual_seed(3)
        model.init_weights()
    expected = whole.state_dict()
    for name, tensor in part.state_dict().items():
        is_shared = ".mlp.experts." in name
        held = expected[name][experts.start : experts.stop] if is_shared else expected[name]
        assert torch.equal(tensor, held), name
        assert len(tensor) == len(held)


def test_drawing_makes_one_tensor_of_all_experts_a_weight_and_none_where_all_are_held() -> None:
    model, whole = with_room_for(HALVES[1]), with_room_for(None)
    with MadeTensors() as made:
        model.init_weights()
    stacked = [
        (NUM_EXPERTS, *weight.shape[1:])
        for block in iter_moe_blocks(model)
        for weight in block.experts.parameters()
    ]
    assert sorted(made.shapes) == sorted(stacked)
    with MadeTensors() as made:
        whole.init_weights()
    assert made.shapes == []


def test_experts_elsewhere_count_as_parameters_of_the_model() -> None:
    whole, part = with_room_for(None), with_room_for(HALVES[0])
    assert (held_experts(whole), held_experts(part)) == (None, HALVES[0])
    for active in (False, True):
        assert part.num_parameters(active) == whole.num_parameters(active)


def test_room_is_made_on_the_meta_device_and_keeps_what_is_frozen() -> None:
    with torch.device("meta"):
        model = AfmoeForCausalLM(AfmoeConfig(**SMALL), compute="reference")
    experts: nn.Module = next(iter_moe_blocks(model)).experts
    experts.requires_grad_(False)
    hold_experts(model, HALVES[0])
    assert [weight.requires_grad for weight in experts.parameters()] == [False] * 3
    with pytest.raises(AssertionError, match="gate_proj has memory already"):
        hold_experts(with_room_for(None), HALVES[0])
