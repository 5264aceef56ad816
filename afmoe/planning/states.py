"""Weights, gradients and optimizer states of one rank.

    plain, ddp     weights w P, gradients w P, AdamW 8 P, fp32 copies 4 P where w = 2
    ZeRO 1         weights w P, gradients 4 P, and of this rank's share P / n: AdamW 8, fp32 weights 4
    ZeRO 2         the same, gradients 4 P / n
    ZeRO 3         the same, weights w P / n

P: parameters held before ZeRO (experts / ep_size), n: ranks that hold the same ones (all for dense weights,
ranks / ep_size for experts), w: bytes of a stored weight. DeepSpeed (0.19) keeps fp32 weights of its share
beside the model's even where those are fp32, and sums gradients in fp32.
"""

from __future__ import annotations

import math
from collections import defaultdict

from afmoe.planning.parameters import Parameter, buffer_bytes, parameters
from afmoe.planning.parts import STEP, Part
from afmoe.planning.setup import BF16, FP32, Setup

ADAM_BYTES = 8
"""exp_avg and exp_avg_sq in fp32."""
PERSISTENT_NUMEL = 100_000
"""Parameters up to this size stay whole under ZeRO 3 (`stage3_param_persistence_threshold`)."""
_ALIGNMENT = 2


def state_parts(setup: Setup, held: list[Parameter] | None = None) -> list[Part]:
    """All of it, for the device and the host. `held`: this rank's parameters, if they are listed already."""
    held = parameters(setup) if held is None else held
    parts = [
        Part("weights", name, sum(_weight_bytes(setup, one) for one in held if one.is_expert is is_expert))
        for name, is_expert in (("dense", False), ("experts", True))
    ]
    parts.append(Part("weights", "buffers", buffer_bytes(setup)))
    trained = [one for one in held if one.is_trained]
    parts += [
        Part("gradients", name, gradient_bytes(setup, [one for one in trained if one.is_expert is is_expert]))
        for name, is_expert in (("dense", False), ("experts", True))
    ]
    return parts + (_sharded_states(setup, trained) if setup.zero_stage else _whole_states(setup, trained))


def gradient_bytes(setup: Setup, trained: list[Parameter]) -> int:
    """What is kept of gradients from the first micro-batch to the step."""
    if setup.zero_stage == 0:
        return sum(one.num_bytes for one in trained)
    if setup.zero_stage == 1:
        return FP32 * sum(one.numel for one in trained)
    # the sum of earlier micro-batches lies beside the gradients of the running one
    copies = 1 if setup.accumulate == 1 else 2
    return copies * FP32 * sum(shares(setup, trained).values())


def shares(setup: Setup, trained: list[Parameter]) -> dict[tuple[bool, bool, int], int]:
    """Numbers of each optimizer group that this rank steps under ZeRO, padding included."""
    sizes: dict[tuple[bool, bool, int], int] = defaultdict(int)
    for one in trained:
        num_ranks = num_replicas(setup, one)
        # stage 3 cuts every parameter, 1 and 2 what a group's parameters are joined to
        sizes[one.group] += math.ceil(one.numel / num_ranks) if setup.zero_stage == 3 else one.numel
    if setup.zero_stage == 3:
        return dict(sizes)
    result = {}
    for group, size in sizes.items():
        num_ranks = setup.num_expert_replicas if group[0] else setup.num_ranks
        result[group] = math.ceil(size / (_ALIGNMENT * num_ranks)) * _ALIGNMENT
    return result


def num_replicas(setup: Setup, parameter: Parameter) -> int:
    """Ranks that hold the same numbers."""
    return setup.num_expert_replicas if parameter.is_expert else setup.num_ranks


def _weight_bytes(setup: Setup, parameter: Parameter) -> int:
    if setup.zero_stage != 3:
        return parameter.num_bytes
    share = math.ceil(parameter.numel / setup.num_ranks) * parameter.num_bytes_each
    return share + (parameter.num_bytes if parameter.numel <= PERSISTENT_NUMEL else 0)


def _whole_states(setup: Setup, trained: list[Parameter]) -> list[Part]:
    """Every rank steps every parameter that it holds."""
    parts = []
    narrow = sum(one.numel for one in trained if one.num_bytes_each == BF16)
    if narrow:
        parts = [
            Part("optimizer", "fp32 weights", FP32 * narrow),
            Part("optimizer", "fp32 gradients", FP32 * narrow, STEP),
        ]
    if setup.optimizer == "muon":
        matrices = sum(one.numel for one in trained if one.is_hidden_matrix)
        parts.append(Part("optimizer", "momentum", FP32 * matrices))
        trained = [one for one in trained if not one.is_hidden_matrix]
    # and a count of steps each
    averages = ADAM_BYTES * sum(one.numel for one in trained) + FP32 * len(trained)
    return [*parts, Part("optimizer", "AdamW averages", averages)]


def _sharded_states(setup: Setup, trained: list[Parameter]) -> list[Part]:
    sizes = shares(setup, trained)
    share = sum(sizes.values())
    # a CPU's memory is the host's
    on_host = setup.offload_optimizer and setup.device_type == "cuda"
    parts = [Part("optimizer", "fp32 weights", FP32 * share, on_host=on_host)]
    averaged = list(sizes.values())
    if setup.optimizer == "muon":
        matrices = [size for (_, is_matrix, _), size in sizes.items() if is_matrix]
        averaged = [size for (_, is_matrix, _), size in sizes.items() if not is_matrix]
        parts.append(Part("optimizer", "momentum", FP32 * sum(matrices)))
        parts.append(Part("optimizer", "whole matrices of a group", _muon_step(setup, sizes), STEP))
    averages = ADAM_BYTES * sum(averaged) + FP32 * len(averaged)
    parts.append(Part("optimizer", "AdamW averages", averages, on_host=on_host))
    if on_host:
        parts.append(Part("optimizer", "gradients of the share", FP32 * share, on_host=True))
    else:
        # a group's gradients, copied into one tensor
        parts.append(Part("optimizer", "gradients of a group", FP32 * max(sizes.values(), default=0), STEP))
    return parts


def _muon_step(setup: Setup, sizes: dict[tuple[bool, bool, int], int]) -> int:
    """Weights, gradients, momenta of the largest group that ranks share, put together; and one in pieces."""
    ranks = {True: setup.num_expert_replicas, False: setup.num_ranks}
    gathered = [
        size * ranks[is_expert]
        for (is_expert, is_matrix, _), size in sizes.items()
        if is_matrix and ranks[is_expert] > 1
    ]
    return 4 * FP32 * max(gathered, default=0)
