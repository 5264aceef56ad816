"""The table of dtypes in docs/numerics.md is what a training step has: storage, products, what is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open

from afmoe import AfmoeConfig, AfmoeForCausalLM, iter_moe_blocks
from afmoe.module import AfmoeModule
from afmoe.moe.router import Routing
from afmoe.optim.loss_scaling import LossScaling
from afmoe.registry import build, configure

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
COLUMNS = ("norms", "experts", "gate, stored", "gate, product", "scores", "selection bias", "its export")
CONFIG = AfmoeConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    num_shared_experts=1,
    sliding_window=8,
)


def table() -> dict[tuple[str, bool], dict[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\| (.*) \|$", text[text.index("| precision | ") :], re.MULTILINE)[:9]
    names = head.split(" | ")
    assert names == ["precision", "`fp32_router`", *COLUMNS]
    cells = [row.split(" | ") for row in rows]
    return {(row[0].strip("`"), row[1] == "yes"): dict(zip(COLUMNS, row[2:], strict=True)) for row in cells}


class LastRouting(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        router = next(iter_moe_blocks(pl_module)).router
        router.register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, routing: Routing) -> None:
        self.routing = routing


def one_batch() -> dict[str, Any]:
    ids = torch.arange(1, 17)[None]
    return {
        "input_ids": ids,
        "position_ids": torch.arange(16)[None],
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "labels": ids,
        "document_ids": torch.zeros_like(ids),
        "num_label_tokens": 15,
        "num_own_label_tokens": 15,
        "num_real_tokens": 16,
    }


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def trained(precision: str, fp32_router: bool) -> tuple[AfmoeForCausalLM, Routing]:
    """The model after one step, and what its first router decided in it."""
    module = AfmoeModule(
        AfmoeForCausalLM(CONFIG),
        optim=build(configure("optim", "adamw")),
        scheduler=build(configure("scheduler", "wsd")),
        seed=0,
    )
    last = LastRouting()
    is_fp16 = precision == "16-mixed"
    router_callbacks = [build(configure("callbacks", "fp32_router"))] if fp32_router else []
    trainer = pl.Trainer(
        accelerator="cpu",
        precision=None if is_fp16 else precision,  # pyright: ignore[reportArgumentType]
        plugins=[LossScaling("cpu")] if is_fp16 else [],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[last, *router_callbacks],
    )
    trainer.fit(module, torch.utils.data.DataLoader([one_batch()], batch_size=None))  # pyright: ignore[reportArgumentType]
    return module.model, last.routing


# Lightning 2.6.6 against torch 2.13, and a hint about data workers
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:You defined a"
)
@pytest.mark.parametrize("fp32_router", [False, True], ids=["plain", "fp32_router"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_table_of_dtypes_is_what_a_step_has(precision: str, fp32_router: bool, tmp_path: Path) -> None:
    model, routing = trained(precision, fp32_router)
    block = next(iter_moe_blocks(model))
    norms = {short(weight.dtype) for name, weight in model.named_parameters() if "norm" in name}
    # logits out of a bf16 product are numbers of bf16, whatever they are handed on in
    product = next(
        dtype
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if torch.equal(routing.logits_TE, routing.logits_TE.to(dtype).float())
    )
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        exported = file.get_tensor("model.layers.1.mlp.expert_bias").dtype
    found = {
        "norms": norms.pop(),
        "experts": short(block.experts.gate_proj.dtype),
        "gate, stored": short(block.router.gate.weight.dtype),
        "gate, product": short(product),
        "scores": short(routing.scores_TE.dtype),
        "selection bias": short(block.router.selection_bias.dtype),
        "its export": short(exported),
    }
    assert not norms
    assert found == table()[precision, fp32_router]
