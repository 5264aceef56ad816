"""Each step's figures stay on the device between logs, and come to the host exact."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from afmoe import iter_moe_blocks
from afmoe.module import AfmoeModule
from afmoe.registry import build, configure
from callbacks.gather_steps import GatherSteps
from callbacks.run_metrics import RunMetrics
from tests.optim.trained_model import small_model

NAN = math.nan


def module_on(device: str) -> AfmoeModule:
    with torch.device(device):
        model = small_model()
    for block in iter_moe_blocks(model):
        block.statistics_on(torch.device(device))
    optim, scheduler = (
        build(configure(group, {"name": name}))
        for group, name in (("optim", "adamw"), ("scheduler", "constant"))
    )
    return AfmoeModule(model, optim=optim, scheduler=scheduler, seed=0)


def gather(
    module: Any,
    losses: list[float],
    steps: GatherSteps,
    *,
    device: str = "cpu",
    log_every_n_steps: int = 1000,
) -> None:
    """Let `steps` see the ends of optimizer steps with these losses."""
    trainer: Any = SimpleNamespace(
        log_every_n_steps=log_every_n_steps,
        accumulate_grad_batches=1,
        strategy=SingleDeviceStrategy(torch.device("cpu")),
    )
    module._trainer = trainer
    steps.setup(trainer, module, "fit")
    for step, loss in enumerate(losses, start=1):
        trainer.global_step = step
        module.step_loss = torch.tensor(loss, device=device)
        module.gradient_norm = torch.tensor(2 * loss, device=device)
        steps.on_train_batch_end(trainer, module, None, {"num_real_tokens": 10 * step}, 0)


def test_a_step_reads_nothing_back_between_logs():
    # a tensor on `meta` has no content: to read it is an error
    module, steps = module_on("meta"), GatherSteps()
    gather(module, [1.0, 2.0, 3.0], steps, device="meta", log_every_n_steps=4)
    with pytest.raises(NotImplementedError, match="meta"):
        steps.read()


def test_figures_come_to_the_host_bit_for_bit_and_are_taken_once():
    module, steps = module_on("cpu"), GatherSteps()
    large = 2**40 + 1
    for block in iter_moe_blocks(module):
        assert block.statistics is not None
        block.statistics.counts_E += torch.tensor([large, 0, 1, 2])
        block.statistics.num_tokens += 3
        block.statistics.confidence_sum += 1.0
    losses = [0.1, NAN, 1e-42, math.inf]
    gather(module, losses, steps)
    taken = steps.take()
    assert [figures.step for figures in taken] == [1, 2, 3, 4]
    assert [figures.num_tokens for figures in taken] == [10, 20, 30, 40]
    for figures, loss in zip(taken, losses, strict=True):
        assert torch.equal(figures.loss.view(torch.int32), torch.tensor(loss).view(torch.int32))
        assert torch.equal(figures.gradient_norm.view(torch.int32), torch.tensor(2 * loss).view(torch.int32))
        assert figures.counts_LE.tolist() == [[large, 0, 1, 2]] * 2
        assert torch.equal(figures.confidence_L, torch.tensor([1.0, 1.0]) / 3)
    assert steps.take() == []


def test_the_last_losses_of_a_resumed_run_are_those_of_one_that_went_on():
    module = module_on("cpu")
    losses = [float(step) if step % 4 else NAN for step in range(1, 41)]
    whole = RunMetrics(GatherSteps())
    gather(module, losses, whole.steps)
    first, second = RunMetrics(GatherSteps()), RunMetrics(GatherSteps())
    gather(module, losses[:30], first.steps)
    second.load_state_dict(first.state_dict())
    assert second.losses() == first.losses()
    assert second.max_violation() == first.max_violation() == 0.0
    gather(module, losses[30:], second.steps)
    assert second.losses() == whole.losses() == [loss for loss in losses[20:] if loss == loss]
