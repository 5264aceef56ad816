"""bf16 weights with fp32 behind them, and fp16 with a scaled loss: what is kept, skipped and continued."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from trained_model import draw_gradients, small_model

from afmoe.module import AfmoeModule
from afmoe.optim.clipping import clip_gradients
from afmoe.optim.loss_scaling import LossScaling
from afmoe.optim.master_weights import MasterWeights
from afmoe.registry import build, configure


def with_masters(model: torch.nn.Module, name: str = "adamw", **options: Any) -> MasterWeights:
    return MasterWeights(build(configure("optim", {"name": name, **options})).optimizer(model))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_masters_take_the_steps_of_fp32_weights_and_the_model_their_rounding(name: str) -> None:
    model, wide = small_model().bfloat16(), small_model()
    wide.load_state_dict(model.state_dict())
    optimizer = with_masters(model, name)
    reference = build(configure("optim", name)).optimizer(wide)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in (optimizer, reference)
    ]
    for seed in range(5):
        draw_gradients(model, seed)
        for parameter, other in zip(model.parameters(), wide.parameters(), strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.float()
        for one, schedule in zip((optimizer, reference), schedules, strict=True):
            one.step()
            schedule.step()
    for parameter, other in zip(model.parameters(), wide.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, other.bfloat16())


def test_steps_smaller_than_bf16_resolves_add_up() -> None:
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4, 4), 0.5, dtype=torch.bfloat16))

    module = One()
    optimizer = with_masters(module, lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    # AdamW moves by the rate while the gradient does not change; a bf16 next to 0.5 is 0.002 away
    torch.testing.assert_close(module.weight.float(), torch.full((4, 4), 0.4), rtol=0, atol=1e-3)


def test_parameters_in_fp32_have_no_copy_and_are_trained_themselves() -> None:
    model = small_model()
    for layer in (1, 2):
        model.model.layers[layer].mlp.router.fp32 = True
    model.bfloat16()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = with_masters(model)
    draw_gradients(model)
    optimizer.step()
    gates = {name for name, one in model.named_parameters() if one.dtype == torch.float32}
    assert gates == {f"model.layers.{layer}.mlp.router.gate.weight" for layer in (1, 2)}
    parameters = dict(model.named_parameters())
    assert all(not torch.equal(parameters[name], before[name]) for name in gates)
    state = optimizer.state_dict()["state"]
    names = [name for group in optimizer.param_groups for name in group["parameter_names"]]
    assert {names[index] for index, one in state.items() if "master" not in one} == gates
    assert all(one["exp_avg"].dtype == torch.float32 for one in state.values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_masters_and_states_are_continued_bitwise(name: str) -> None:
    straight, buffer = small_model().bfloat16(), io.BytesIO()
    optimizer = with_masters(straight, name)
    for seed in range(4):
        draw_gradients(straight, seed)
        optimizer.step()
        if seed == 1:
            torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    wanted = optimizer.state_dict()["state"]
    buffer.seek(0)
    stored = torch.load(buffer, weights_only=True)
    continued = small_model().bfloat16()
    continued.load_state_dict(stored["model"])
    optimizer = with_masters(continued, name)
    optimizer.load_state_dict(stored["optimizer"])
    for seed in (2, 3):
        draw_gradients(continued, seed)
        optimizer.step()
    found = optimizer.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for index in wanted:
        assert all(torch.equal(found[index][key], wanted[index][key]) for key in wanted[index])


def test_found_inf_reaches_the_wrapped_optimizer() -> None:
    model = small_model().bfloat16()
    optimizer = with_masters(model)
    before = [one.detach().clone() for one in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_is_known_in_fp32_and_clips_all_gradients_to_the_limit(dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    draw_gradients(model)
    gradients = [one.grad.double() for one in model.parameters() if one.grad is not None]
    wanted = torch.stack([one.norm() for one in gradients]).norm()
    assert clip_gradients(model.parameters(), None) == pytest.approx(float(wanted), rel=1e-6)
    kept = [one.grad.double() for one in model.parameters() if one.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(kept, gradients, strict=True))
    norm = clip_gradients(model.parameters(), 1.0)
    assert norm.dtype == torch.float32
    assert norm == pytest.approx(float(wanted), rel=1e-6)
    for parameter, before in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, (before / wanted).to(dtype), rtol=1e-2, atol=1e-8)


class Steps(pl.Callback):
    """What each optimizer step was like; `overflow_at`: a step whose gradients are made to overflow."""

    def __init__(self, overflow_at: int | None = None) -> None:
        self.overflow_at = overflow_at
        self.norms: list[float] = []
        self.skipped: list[float] = []
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step == self.overflow_at:
            pl_module.model.lm_head.weight.grad[0, 0] = torch.inf

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.norms.append(float(pl_module.gradient_norm))
        self.skipped.append(float(pl_module.skipped_step))
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.weights.append(pl_module.model.lm_head.weight.detach().clone())
        self.bad_step = float(pl_module.bad_step)


def batch(seed: int = 0) -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "position_ids": torch.arange(16).expand(2, 16).clone(),
        "attention_mask": torch.ones(2, 16, dtype=torch.bool),
        "labels": ids,
        "document_ids": torch.tensor([[0], [1]]).expand(2, 16).clone(),
        "num_label_tokens": 30,
        "num_own_label_tokens": 30,
        "num_real_tokens": 32,
    }


def module_of(optim: str) -> AfmoeModule:
    torch.manual_seed(0)
    return AfmoeModule(
        small_model(),
        optim=build(configure("optim", optim)),
        scheduler=build(configure("scheduler", {"name": "constant", "warmup_steps": 0})),
        seed=0,
        exact_match_metric="val/exact",
    )


def trainer_with(tmp_path: Path, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **settings,
    )


def loader(num_batches: int) -> Any:
    batches: Any = [batch(seed) for seed in range(num_batches)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def test_validation_counts_exactly_under_bf16_true(tmp_path: Path) -> None:
    module = module_of("adamw")
    seen: dict[str, Tensor] = {}
    trainer = trainer_with(tmp_path, precision="bf16-true", callbacks=[Sums(seen)])
    trainer.validate(module, loader(40), verbose=False)
    # in bf16 the sum is 1240
    assert seen["labels"] == 1200
    assert seen["documents"] == 80
    assert {total.dtype for total in seen.values()} == {torch.float32}


class Sums(pl.Callback):
    """The sums of a validation, before the module resets them."""

    def __init__(self, seen: dict[str, Tensor]) -> None:
        self.seen = seen

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen |= {name: metric.compute() for name, metric in pl_module.validation.items()}


def fit_scaled(
    tmp_path: Path, steps: Steps, *, init_scale: float, optim: str = "adamw", max_steps: int = 3
) -> AfmoeModule:
    module = module_of(optim)
    plugin = LossScaling("cpu")
    assert plugin.scaler is not None
    plugin.scaler.load_state_dict(plugin.scaler.state_dict() | {"scale": init_scale})
    trainer = trainer_with(tmp_path, plugins=[plugin], max_steps=max_steps, callbacks=[steps])
    trainer.fit(module, loader(8))
    return module


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_gradients_are_measured_and_clipped_unscaled(optim: str, tmp_path: Path) -> None:
    found = {}
    for scale in (1.0, 256.0):
        steps = Steps()
        fit_scaled(tmp_path, steps, init_scale=scale, optim=optim, max_steps=1)
        assert steps.skipped == [0.0]
        found[scale] = steps.norms[0]
    # fp16 loses small gradients without a scale: measured 1.3e-4 apart; 256 where it was not taken off
    assert found[256.0] == pytest.approx(found[1.0], rel=1e-3)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_step_that_overflows_is_skipped_halves_the_scale_and_is_no_fault(optim: str, tmp_path: Path) -> None:
    steps = Steps(overflow_at=1)
    module = fit_scaled(tmp_path, steps, init_scale=64.0, optim=optim)
    assert steps.scales == [64.0, 32.0, 32.0]
    assert steps.skipped == [0.0, 1.0, 0.0]
    assert torch.equal(steps.weights[0], steps.weights[1])
    assert not torch.equal(steps.weights[1], steps.weights[2])
    assert steps.bad_step == 0.0
    assert all(torch.isfinite(one).all() for one in module.parameters())


def test_fp16_products_on_a_cpu_are_fp16(tmp_path: Path) -> None:
    plugin = LossScaling("cpu")
    with plugin.forward_context():
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    assert plugin.precision == "16-mixed"
