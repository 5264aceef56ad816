"""Muon against one matrix at a time, torch's own, and itself continued."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from trained_model import draw_gradients, small_model, snapshot

from afmoe.errors import ConfigError
from afmoe.optim import muon
from afmoe.optim.groups import is_hidden_matrix
from afmoe.optim.newton_schulz import orthogonalize
from afmoe.registry import build, configure

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.9


def optimizer_of(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    options = {
        "lr": LR,
        "weight_decay": DECAY,
        "momentum": MOMENTUM,
        "newton_schulz_dtype": "float32",
    } | options
    return build(configure("optim", {"name": "muon", **options})).optimizer(model)


def reference_orthogonal(matrix: Tensor) -> Tensor:
    """Jordan's iteration on one matrix, as written in his post."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


def reference_steps(weight: Tensor, gradients: list[Tensor], factor: float, nesterov: bool) -> Tensor:
    """One matrix after some steps, in fp64."""
    weight, momentum = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        update = (1 - MOMENTUM) * gradient.double() + MOMENTUM * momentum if nesterov else momentum
        weight = weight * (1 - LR * DECAY) - LR * factor * reference_orthogonal(update)
    return weight


FACTORS = {
    "original": lambda rows, columns: max(1, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", list(FACTORS))
def test_every_matrix_and_every_expert_is_moved_as_if_it_were_alone(
    rule: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three matrices at once, so that stacks are cut and others share a batch
    monkeypatch.setattr(muon, "_BATCH_VALUES", 3 * 24 * 32)
    model = small_model()
    before = snapshot(model)
    optimizer = optimizer_of(model, rate_rule=rule, nesterov=nesterov)
    gradients: dict[str, list[Tensor]] = {name: [] for name in before}
    for seed in range(3):
        draw_gradients(model, seed)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name].append(parameter.grad.clone())
        optimizer.step()
    worst = 0.0
    for name, parameter in model.named_parameters():
        if not is_hidden_matrix(name, parameter):
            continue
        factor = FACTORS[rule](*parameter.shape[-2:])
        for index in range(parameter.shape[0]) if parameter.ndim == 3 else [...]:
            seen = [gradient[index] for gradient in gradients[name]]
            wanted = reference_steps(before[name][index], seen, factor, nesterov)
            worst = max(worst, float((parameter[index].detach() - wanted).norm() / wanted.norm()))
    # measured 3.4e-7
    assert worst <= 1e-6


def test_what_is_no_hidden_matrix_follows_adamw() -> None:
    ours, theirs = small_model(), small_model()
    theirs.load_state_dict(ours.state_dict())
    optimizer = optimizer_of(ours, adamw_lr=1e-3)
    names = [name for name, one in theirs.named_parameters() if not is_hidden_matrix(name, one)]
    parameters = dict(theirs.named_parameters())
    adamw = torch.optim.AdamW(
        [parameters[name] for name in names],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        fused=True,
    )
    for seed in range(3):
        draw_gradients(ours, seed)
        draw_gradients(theirs, seed)
        optimizer.step()
        adamw.step()
    found = dict(ours.named_parameters())
    assert all(torch.equal(found[name], parameters[name]) for name in names)


@pytest.mark.parametrize("rule", list(FACTORS))
def test_torchs_muon_agrees_on_matrices(rule: str) -> None:
    shapes = [(48, 32), (32, 48), (40, 40)]
    ours = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)
    theirs = torch.nn.ParameterList(one.detach().clone() for one in ours)
    optimizer = optimizer_of(ours, rate_rule=rule, newton_schulz_dtype="bfloat16")
    torchs = torch.optim.Muon(
        theirs.parameters(), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn=rule
    )
    before = [one.detach().clone() for one in ours]
    for seed in range(3):
        draw_gradients(ours, seed)
        draw_gradients(theirs, seed)
        optimizer.step()
        torchs.step()
    for old, one, other in zip(before, ours, theirs, strict=True):
        # measured 0; another machine may sum the bf16 products of a stack in another order than of one matrix
        assert (one - other).norm() <= 2e-2 * (other - old).norm()


def test_every_routed_weight_moves() -> None:
    model = small_model()
    before = snapshot(model)
    optimizer = optimizer_of(model, weight_decay=0.0)
    ids = torch.randint(0, 64, (4, 32))
    loss = model(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # decided by the expert's own tokens: none got none, and orthogonalising leaves no value behind
            assert ((parameter != before[name]).float().mean((1, 2)) > 0.99).all(), name


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(5, 24, 32)))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_a_stack_is_orthogonalized_as_each_of_its_matrices() -> None:
    # fp64: the iteration amplifies rounding, in fp32 to 1e-6 of the result whatever the order of its sums
    stack = torch.randn(16, 24, 32, dtype=torch.float64)
    wanted = torch.stack([reference_orthogonal(matrix) for matrix in stack])
    # measured 2e-15
    torch.testing.assert_close(orthogonalize(stack), wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_found_inf_leaves_parameters_and_state_as_they_are(name: str) -> None:
    model = small_model()
    optimizer: Any = build(configure("optim", {"name": name, "lr": 0.1})).optimizer(model)
    draw_gradients(model)
    optimizer.step()
    weights = snapshot(model)
    states = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(one, weights[key]) for key, one in model.named_parameters())
    for before, after in zip(states, optimizer.state.values(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    # and with a zero the step is the one without the flag
    flagged, plain = small_model(), small_model()
    plain.load_state_dict(flagged.state_dict())
    for one, flag in ((flagged, torch.zeros(())), (plain, None)):
        optimizer = build(configure("optim", {"name": name, "lr": 0.1})).optimizer(one)
        optimizer.found_inf = flag
        draw_gradients(one)
        optimizer.step()
    pairs = zip(flagged.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_state_is_continued_bitwise() -> None:
    straight, buffer = small_model(), io.BytesIO()
    optimizer = optimizer_of(straight)
    for seed in range(4):
        draw_gradients(straight, seed)
        optimizer.step()
        if seed == 1:
            state = {"model": straight.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, buffer)
    buffer.seek(0)
    stored = torch.load(buffer, weights_only=True)
    continued = small_model()
    continued.load_state_dict(stored["model"])
    optimizer = optimizer_of(continued)
    optimizer.load_state_dict(stored["optimizer"])
    for seed in (2, 3):
        draw_gradients(continued, seed)
        optimizer.step()
    pairs = zip(straight.parameters(), continued.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("rate_rule", "jordan", "original, match_rms_adamw"),
        ("newton_schulz_dtype", "half", "auto, float32, bfloat16"),
        ("momentum", 1.0, r"\[0, 1\)"),
        ("adamw_lr", 0.0, "positive"),
    ],
)
def test_impossible_options_are_refused(option: str, value: Any, bound: str) -> None:
    with pytest.raises(ConfigError, match=f"optim.{option} must .*{bound}"):
        configure("optim", {"name": "muon", option: value})
