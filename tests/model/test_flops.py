"""The count of operations from the config is that of the model's own products, on the meta device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from afmoe import CONF_DIRECTORY, AfmoeConfig, AfmoeForCausalLM, iter_moe_blocks
from afmoe.attention.layout import sequence_layout
from afmoe.config import SLIDING_ATTENTION
from afmoe.flops import ModelFlops, visible_pairs

# measured deviation: 0
TOLERANCE = 1e-3


def preset(name: str) -> AfmoeConfig:
    section = OmegaConf.to_container(OmegaConf.load(CONF_DIRECTORY / "model" / f"{name}.yaml"))
    assert isinstance(section, dict)
    del section["pretrained"], section["revision"]
    return AfmoeConfig(**section)


def one_expert_for_all_rows(rows_RD: Tensor, offsets_L: Any, *weights: Any) -> Tensor:
    """What the experts' products cost, whoever the rows go to: the meta device cannot sort them."""
    gate_LFD, up_LFD, down_LDF = weights[:3]
    hidden_RF = (rows_RD @ gate_LFD[0].T) * (rows_RD @ up_LFD[0].T)
    return hidden_RF @ down_LDF[0].T


def counted_on_meta(config: AfmoeConfig, length: int, *, is_training: bool) -> int:
    """Operations of forward, or of forward and backward, by torch's own counter.

    `attention=reference` multiplies every query with every key, so its two products are scaled by the share
    of pairs that the layer's mask lets through, counted on the mask itself.
    """
    assert length not in (config.hidden_size, config.intermediate_size, config.moe_intermediate_size)
    layout = sequence_layout((1, length), torch.device("cpu"))
    num_visible = {}
    for window in (None, config.sliding_window):
        mask = layout.visible(window)
        assert mask is not None
        num_visible[window] = int(mask.sum())
    with torch.device("meta"):
        model = AfmoeForCausalLM(config, attention="reference", compute="reference")
        ids = torch.zeros(1, length, dtype=torch.int64)
    for block in iter_moe_blocks(model):
        block.experts.compute = one_expert_for_all_rows  # pyright: ignore[reportAttributeAccessIssue]
    with FlopCounterMode(display=False) as counter:
        logits = model(ids).logits
        if is_training:
            logits.sum().backward()
    return _without_hidden_pairs(counter, config, num_visible, length)


def _without_hidden_pairs(
    counter: FlopCounterMode, config: AfmoeConfig, num_visible: dict[int | None, int], length: int
) -> int:
    total, by_module = counter.get_total_flops(), counter.get_flop_counts()
    for index, kind in enumerate(config.layer_types or []):
        window = config.sliding_window if kind == SLIDING_ATTENTION else None
        # no other product of the model is a batch of matrices
        products = by_module[f"AfmoeForCausalLM.model.layers.{index}.self_attn"][torch.ops.aten.bmm]
        total -= products - products * num_visible[window] // length**2
    return total


@pytest.mark.parametrize(
    ("name", "length"), [("trinity_nano", 3000), ("trinity_mini", 3000), ("trinity_large", 5000)]
)
def test_operations_per_token_are_those_of_the_models_own_products(name: str, length: int):
    config = preset(name)
    assert length > config.sliding_window
    counted = counted_on_meta(config, length, is_training=False)
    assert ModelFlops.of(config).forward([length]) == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["trinity_nano", "trinity_large"])
def test_training_takes_the_operations_of_forward_and_backward(name: str):
    # the first layers hold every kind of product
    shape = vars(preset(name)) | {"num_hidden_layers": 4, "num_dense_layers": 2, "layer_types": None}
    config, length = AfmoeConfig(**shape | {"sliding_window": 500}), 1500
    counted = counted_on_meta(config, length, is_training=True)
    assert ModelFlops.of(config).training([length]) == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["trinity_nano", "trinity_mini", "trinity_large"])
def test_known_mistakes_lie_outside_the_tolerance(name: str):
    """Dense prefix forgotten, attention gate forgotten, windows forgotten: each is told from the truth."""
    config, length = preset(name), 8192
    right = ModelFlops.of(config).forward([length])
    flops = ModelFlops.of(config)
    heads = config.num_attention_heads * config.head_dim
    no_gate = right - length * 2 * config.hidden_size * heads * config.num_hidden_layers
    no_prefix = AfmoeConfig(**{**vars(config), "num_dense_layers": 0})
    no_windows = flops.per_sliding_pair * (visible_pairs([length]) - visible_pairs([length], flops.window))
    for wrong in (no_gate, ModelFlops.of(no_prefix).forward([length]), right + no_windows):
        assert abs(wrong / right - 1) > 3 * TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_visible_pairs_are_those_of_the_mask_of_packed_documents(window: int | None):
    lengths = [1, 30, 7, 8, 54]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    mask = sequence_layout((1, 100), torch.device("cpu"), positions).visible(window)
    assert mask is not None
    assert visible_pairs(lengths, window) == int(mask.sum())
    assert visible_pairs(np.array(lengths), window) == int(mask.sum())


def test_documents_are_counted_one_by_one_and_the_head_for_labels_only():
    flops = ModelFlops.of(preset("afmoe_mini"))
    assert flops.training([100, 50]) == flops.training([100]) + flops.training([50])
    assert flops.training([100], 10) == flops.training([100]) - 3 * 90 * flops.per_label
    assert flops.forward([]) == 0
