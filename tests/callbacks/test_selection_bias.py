"""Balancing by the selection bias: the rules, what they survive, and what they do to the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_router_callbacks import fit, make_module
from torch import Tensor

from afmoe import iter_moe_blocks
from afmoe.errors import ConfigError
from afmoe.module import AfmoeModule
from afmoe.moe.router import Router
from afmoe.moe.statistics import max_violation
from afmoe.registry import build, configure
from callbacks.moe_callback import refuse_contradictions
from callbacks.selection_bias import SelectionBias

COUNTS = torch.tensor([[40, 20, 20, 0], [10, 10, 10, 10]])


def callback(**options: Any) -> SelectionBias:
    return build(configure("callbacks", {"name": "selection_bias", **options}))


def biases(module: AfmoeModule) -> Tensor:
    return torch.stack([block.router.selection_bias.clone() for block in iter_moe_blocks(module)])


def test_sign_rule_moves_each_bias_by_the_rate_against_its_load() -> None:
    found = callback(rate=0.01, centre=False).changes(COUNTS)
    torch.testing.assert_close(found, 0.01 * torch.tensor([[-1.0, 0, 0, 1], [0, 0, 0, 0]]))
    # one too busy, three idle: without the mean the biases would drift up together
    lopsided = torch.tensor([[30, 0, 0, 0]])
    found = callback(rate=0.01).changes(lopsided)
    torch.testing.assert_close(found, 0.01 * torch.tensor([[-1.5, 0.5, 0.5, 0.5]]))


def test_smebu_is_clamped_centred_and_carried_on() -> None:
    one = callback(rule="smebu", rate=0.01, kappa=2.0, momentum=0.5)
    violation = torch.tensor([[-1.0, 0, 0, 1], [0, 0, 0, 0]])
    change = 0.01 * torch.tanh(2.0 * violation)
    momentum = torch.zeros(2, 4)
    for _ in range(3):
        momentum = 0.5 * momentum + 0.5 * change
        torch.testing.assert_close(one.changes(COUNTS), momentum, rtol=1e-5, atol=1e-9)
    centred = callback(rule="smebu").changes(torch.tensor([[30, 0, 0, 0]]))
    assert centred.sum().abs() < 1e-9


@pytest.mark.parametrize("rule", ["sign", "smebu"])
def test_a_skipped_step_moves_nothing(rule: str) -> None:
    one = callback(rule=rule)
    one.changes(COUNTS, torch.zeros(()))
    momentum = None if one.momentum_LE is None else one.momentum_LE.clone()
    assert not one.changes(COUNTS, torch.ones(())).any()
    assert momentum is None or (one.momentum_LE is not None and torch.equal(momentum, one.momentum_LE))
    assert torch.equal(callback().changes(COUNTS, torch.zeros(())), callback().changes(COUNTS))


def test_no_tokens_move_nothing() -> None:
    for rule in ("sign", "smebu"):
        assert not callback(rule=rule).changes(torch.zeros(2, 4, dtype=torch.int64)).any()


class Biases(pl.Callback):
    """Keeps the biases after each micro-batch."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.seen.append(biases(pl_module))


def test_biases_move_once_a_step_by_the_counts_of_all_its_micro_batches(tmp_path: Path) -> None:
    module, seen = make_module(), Biases()
    recorder = fit(module, ["selection_bias"], tmp_path, accumulate_grad_batches=2, max_steps=3, extra=[seen])
    previous = torch.zeros(2, 4)
    for micro_batch, (counts_LE, now) in enumerate(zip(recorder.counts, seen.seen, strict=True)):
        wanted = callback().changes(counts_LE) if micro_batch % 2 else torch.zeros(2, 4)
        torch.testing.assert_close(now - previous, wanted, rtol=0, atol=1e-7)
        previous = now
    assert previous.any()


def test_100_updates_of_a_thousandth_survive_bf16_true(tmp_path: Path) -> None:
    module, seen = make_module(), Biases()
    for block in iter_moe_blocks(module):
        block.router.selection_bias.fill_(0.5)
    recorder = fit(module, ["selection_bias"], tmp_path, precision="bf16-true", max_steps=100, extra=[seen])
    wanted = 0.5 + sum(callback().changes(counts_LE) for counts_LE in recorder.counts)
    assert {block.router.selection_bias.dtype for block in iter_moe_blocks(module)} == {torch.float32}
    # measured 3e-7; in bf16 every update is lost: its neighbour of 0.5 is 0.504
    torch.testing.assert_close(biases(module), wanted, rtol=0, atol=3e-6)
    assert (biases(module) - 0.5).abs().max() > 0.01
    in_bf16 = torch.tensor(0.5, dtype=torch.bfloat16)
    assert in_bf16 + torch.tensor(1e-3, dtype=torch.bfloat16) == in_bf16


@pytest.mark.parametrize(("rule", "bound"), [("sign", 0.2), ("smebu", 0.1)])
def test_biases_even_out_the_load_of_a_skewed_router(rule: str, bound: float) -> None:
    config = make_module().model.config
    router, one = Router(config), callback(rule=rule, rate=2e-3)
    tokens_TD = torch.randn(512, config.hidden_size)
    with torch.no_grad():
        torch.nn.init.normal_(router.gate.weight, std=0.02)
        # two experts that every token likes
        tokens_TD[:, 0] = 1.0
        router.gate.weight[:2, 0] = 1.0
    violations = []
    for _ in range(200):
        counts_E = torch.bincount(router(tokens_TD).expert_ids_TK.flatten(), minlength=4)
        violations.append(float(max_violation(counts_E)))
        router.selection_bias += one.changes(counts_E[None])[0]
    # from 1, all tokens at two of four experts; measured at the end: sign 0.06, smebu 0.00
    assert violations[0] == 1.0
    assert max(violations[-20:]) < bound


@pytest.mark.parametrize("other", ["freeze_router", "balanced_routing"])
def test_contradicting_callbacks_are_refused(other: str) -> None:
    both = [build(configure("callbacks", name)) for name in (other, "load_balance", "selection_bias")]
    with pytest.raises(ConfigError, match=f"selection_bias does not go with {other}: "):
        refuse_contradictions(both)
    refuse_contradictions(both[1:])


@pytest.mark.parametrize(
    ("option", "value"), [("rule", "signed"), ("rate", 0.0), ("kappa", -1.0), ("momentum", 1.0)]
)
def test_impossible_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"callbacks.selection_bias.{option} must "):
        callback(**{option: value})
