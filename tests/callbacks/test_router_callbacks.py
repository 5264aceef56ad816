"""The callbacks on routers and expert load, in real fits of a tiny model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, Dataset

from afmoe import iter_moe_blocks
from afmoe.errors import ConfigError
from afmoe.module import AfmoeModule
from afmoe.optim.loss_scaling import LossScaling
from afmoe.registry import build, configure
from callbacks.heat_map import heat_map
from tests.optim.trained_model import small_model


class Batches(Dataset):
    """Random tokens, two documents a row and some padding at its end."""

    def __init__(self, length: int = 6, padding: int = 3) -> None:
        self.length, self.padding = length, padding

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(index))
        positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16).clone()
        mask = torch.ones(2, 16, dtype=torch.bool)
        mask[:, 16 - self.padding :] = False
        labels = ids.masked_fill(~mask | (positions == 0), -100)
        documents = torch.tensor([0] * 7 + [1] * 9).expand(2, 16).masked_fill(~mask, -1)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": mask,
            "labels": labels,
            "document_ids": documents,
            "num_label_tokens": int((labels != -100).sum()),
            "num_own_label_tokens": int((labels != -100).sum()),
            "num_real_tokens": int(mask.sum()),
        }


def make_module(**changes: Any) -> AfmoeModule:
    return AfmoeModule(
        small_model(moe_intermediate_size=32, mup_enabled=True, **changes),
        optim=build(configure("optim", {"name": "adamw", "lr": 1e-2})),
        scheduler=build(configure("scheduler", "wsd")),
        seed=0,
    )


class Figures(Logger):
    """Keeps what is logged, by step."""

    name = version = "figures"

    def __init__(self) -> None:
        self.steps: dict[int | None, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Recorder(pl.Callback):
    """Keeps what the callbacks before it logged at each step."""

    def __init__(self) -> None:
        self.figures = Figures()
        self.logged: list[dict[str, float]] = []
        self.counts: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.counts.append(
            torch.stack([block.statistics.counts_E.clone() for block in iter_moe_blocks(pl_module)])
        )


def fit(
    module: AfmoeModule,
    names: list[str],
    tmp_path: Path,
    *,
    extra: Sequence[pl.Callback] = (),
    **settings: Any,
) -> Recorder:
    callbacks = [build(configure("callbacks", name)) for name in names]
    if settings.get("precision") == "16-mixed":
        settings |= {"precision": None, "plugins": [LossScaling("cpu")]}
    recorder = Recorder()
    trainer = pl.Trainer(
        **{
            "max_steps": 3,
            "max_epochs": -1,
            "accelerator": "cpu",
            "devices": 1,
            "logger": recorder.figures,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "default_root_dir": tmp_path,
        }
        | settings,
        callbacks=[*callbacks, *extra, recorder],
    )
    trainer.fit(module, DataLoader(Batches(), batch_size=None))
    return recorder


def gates(module: AfmoeModule) -> list[torch.Tensor]:
    return [block.router.gate.weight.detach().clone() for block in iter_moe_blocks(module)]


def test_freeze_router_keeps_gate_and_bias_and_trains_the_rest(tmp_path: Path) -> None:
    module = make_module()
    before, experts = gates(module), next(iter_moe_blocks(module)).experts.gate_proj.detach().clone()
    fit(module, ["freeze_router"], tmp_path)
    assert all(torch.equal(old, new) for old, new in zip(before, gates(module), strict=True))
    assert not torch.equal(experts, next(iter_moe_blocks(module)).experts.gate_proj)
    # without it they move
    moved = make_module()
    before = gates(moved)
    fit(moved, [], tmp_path)
    assert not any(torch.equal(old, new) for old, new in zip(before, gates(moved), strict=True))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_fp32_router_stores_and_multiplies_in_fp32(tmp_path: Path, precision: Any) -> None:
    module = make_module()
    fit(module, ["fp32_router"], tmp_path, precision=precision)
    for block in iter_moe_blocks(module):
        assert block.router.gate.weight.dtype == torch.float32
        assert block.router.selection_bias.dtype == torch.float32
        tokens_TD = torch.randn(5, 32, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            logits_TE = block.router(tokens_TD).logits_TE
        torch.testing.assert_close(
            logits_TE, tokens_TD.float() @ block.router.gate.weight.T, rtol=1e-6, atol=1e-6
        )
    assert module.model.lm_head.weight.dtype == (
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    )
    plain = make_module()
    fit(plain, [], tmp_path, precision=precision)
    stored = {block.router.gate.weight.dtype for block in iter_moe_blocks(plain)}
    assert stored == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


def test_balanced_routing_spreads_real_tokens_evenly_while_training(tmp_path: Path) -> None:
    module = make_module()
    recorder = fit(module, ["balanced_routing", "load_balance"], tmp_path)
    # 2 rows x 13 real tokens x top-2 over 4 experts
    assert all(torch.equal(counts, torch.full((2, 4), 13)) for counts in recorder.counts)
    assert recorder.logged[-1]["moe/max_violation"] == 0.0
    assert recorder.logged[-1]["moe/load_entropy"] == pytest.approx(1.0)
    assert not any(block.router.balanced for block in iter_moe_blocks(module)), (
        "the model keeps its own routing"
    )


def test_load_balance_logs_the_figures_of_the_steps_counts(tmp_path: Path) -> None:
    recorder = fit(
        make_module(num_dense_layers=1), ["load_balance"], tmp_path, accumulate_grad_batches=2, max_steps=3
    )
    steps = list(zip(recorder.logged, recorder.counts, strict=True))[1::2]
    for step, (logged, counts_LE) in enumerate(steps):
        # two micro-batches of 2 x 13 real tokens, top-2; padding is not counted
        assert counts_LE.sum(1).tolist() == [2 * 2 * 13 * 2] * 2
        load_LE = counts_LE.numpy().astype(float)
        violation_L = load_LE.max(1) / load_LE.mean(1) - 1
        share_LE = load_LE / load_LE.sum(1, keepdims=True)
        entropy_L = -np.where(share_LE > 0, share_LE * np.log(np.maximum(share_LE, 1e-30)), 0).sum(
            1
        ) / math.log(4)
        assert logged["moe/max_violation"] == pytest.approx(violation_L.mean(), rel=1e-5)
        for layer in (0, 1):
            of_layer = recorder.figures.steps[step][f"moe/max_violation/layer_0{layer + 1}"]
            assert of_layer == pytest.approx(violation_L[layer], rel=1e-5)
        assert logged["moe/load_entropy"] == pytest.approx(entropy_L.mean(), rel=1e-5)
        assert logged["moe/dead_experts"] == (load_LE == 0).sum(1).mean()
        # the two chosen of four sigmoid scores hold at least half of their sum
        assert 0.5 <= logged["moe/router_confidence"] <= 1.0


def test_router_confidence_is_the_share_of_the_chosen_raw_scores(tmp_path: Path) -> None:
    module = make_module(num_dense_layers=2)
    seen: list[torch.Tensor] = []
    block = next(iter_moe_blocks(module))
    block.router.selection_bias.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0]))
    block.router.register_forward_hook(lambda _, args, routing: seen.append((routing, args[1])))
    recorder = fit(module, ["load_balance"], tmp_path, max_steps=1)
    (routing, mask_T), *_ = seen
    chosen_T = routing.scores_TE.gather(1, routing.expert_ids_TK).sum(1) / routing.scores_TE.sum(1)
    assert recorder.logged[0]["moe/router_confidence"] == pytest.approx(
        chosen_T[mask_T].mean().item(), rel=1e-5
    )
    assert (routing.expert_ids_TK == 1).any(1).all(), "the bias selects"


@pytest.mark.parametrize("name", ["freeze_router", "fp32_router", "balanced_routing", "load_balance"])
def test_each_callback_says_how_many_blocks_it_touches_and_refuses_none(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(make_module(num_dense_layers=1), [name], tmp_path, max_steps=1)
    assert any(f"{name}: " in message and "in 2 MoE blocks" in message for message in caplog.messages)
    with pytest.raises(ConfigError, match=f"callbacks={name} needs a layer with experts"):
        fit(make_module(num_dense_layers=3), [name], tmp_path, max_steps=1)


def test_heat_map_is_darkest_without_tokens_and_brightest_at_twice_the_share() -> None:
    image = heat_map(np.array([[0, 10, 20, 10], [0, 0, 0, 0]]), cell=2)
    assert image.shape == (4, 8, 3)
    assert image.dtype == np.uint8
    brightness = image[::2, ::2].sum(-1)
    assert brightness[0, 0] < brightness[0, 1] < brightness[0, 2]
    assert brightness[0, 1] == brightness[0, 3]
    assert set(brightness[1]) == {brightness[0, 0]}
