"""`attention=flex`: outputs as `reference`, forward only on a CPU, masks without a quadratic tensor."""

from __future__ import annotations

import logging

import pytest
import torch
from parity import TOLERANCE, deviation, our_model, random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from afmoe import registry
from afmoe.attention import AttentionPlugin, check_attention
from afmoe.attention.flex import BLOCK_SIZE, _say_once_what_a_cpu_does, block_mask, kept_blocks
from afmoe.attention.layout import SequenceLayout, sequence_layout
from afmoe.hardware import Hardware, has_cxx_compiler

CPU = Hardware(device_type="cpu")
H200 = Hardware(device_type="cuda", capability=(9, 0))


def packed_and_padded(length: int) -> SequenceLayout:
    """Documents of 1, 40, 150 and the rest in one row, one padded on the left, one of padding."""
    positions = torch.zeros(3, length, dtype=torch.int64)
    places, start = torch.arange(length), 0
    for document in (1, 40, 150, length):
        positions[0, start:] = places[: max(0, length - start)]
        start += document
    mask = torch.ones(3, length, dtype=torch.bool)
    positions[1] = (places - length // 3).clamp(min=0)
    mask[1, : length // 3] = False
    mask[2] = False
    return sequence_layout((3, length), torch.device("cpu"), positions, mask)


def plain(length: int) -> SequenceLayout:
    return sequence_layout((3, length), torch.device("cpu"))


def mixed_by(name: str, layout: SequenceLayout, window: int, is_sliding: bool) -> torch.Tensor:
    return mixed(registry.build(registry.configure("attention", name), window=window), layout, is_sliding)


@torch.no_grad()
def mixed(plugin: AttentionPlugin, layout: SequenceLayout, is_sliding: bool) -> torch.Tensor:
    """What a plugin makes of the same operands."""
    angles = torch.arange(3.0 * layout.num_queries * 4 * 16).view(3, -1, 4, 16)
    operands = [(angles * 3.7).sin(), (angles * 1.3).cos()[:, :, :2], (angles * 2.1).sin()[:, :, :2]]
    return plugin(*operands, plugin.prepare(layout), is_sliding=is_sliding, dropout=0.0)


@pytest.mark.parametrize("is_sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("make", [plain, packed_and_padded])
@pytest.mark.parametrize(("length", "window"), [(1, 1), (2, 1), (63, 16), (300, 1), (300, 16), (300, 200)])
def test_flex_equals_reference(length: int, window: int, make, is_sliding: bool):
    layout = make(length)
    real = torch.ones(3, length, dtype=torch.bool) if make is plain else layout.token_mask_BS
    found = mixed_by("flex", layout, window, is_sliding)
    assert bool(found.isfinite().all())
    # measured 0: the unfused form does what the reference does
    expected = mixed_by("reference", layout, window, is_sliding)
    assert deviation(found[real], expected[real]) <= 1e-6


def test_a_mask_taken_away_is_seen():
    layout = packed_and_padded(300)
    found = mixed_by("flex", plain(300), 16, is_sliding=True)[layout.token_mask_BS]
    expected = mixed_by("reference", layout, 16, is_sliding=True)[layout.token_mask_BS]
    # measured 0.8
    assert deviation(found, expected) > 1e-2


@pytest.mark.parametrize("window", [None, 1, 20, 128, 129, 500])
@pytest.mark.parametrize("make", [plain, packed_and_padded])
@pytest.mark.parametrize("length", [1, 128, 129, 700])
def test_no_visible_pair_lies_outside_the_kept_blocks(length: int, make, window: int | None):
    layout = make(length)
    visible = layout.visible(window)
    if visible is None:
        visible = torch.ones(1, length, length, dtype=torch.bool)
    num_blocks = -(-length // BLOCK_SIZE)
    missing = num_blocks * BLOCK_SIZE - length

    def in_blocks(pairs: torch.Tensor, value: bool) -> torch.Tensor:
        padded = torch.nn.functional.pad(pairs, (0, missing, 0, missing), value=value)
        return padded.unflatten(2, (num_blocks, -1)).unflatten(1, (num_blocks, -1)).transpose(2, 3).flatten(3)

    blocks = kept_blocks(layout, window)
    assert bool((in_blocks(visible, False).any(3) <= blocks.is_kept).all())
    assert bool((blocks.is_whole <= in_blocks(visible, True).all(3)).all())
    # and what is kept is what the kernel is told
    assert torch.equal(block_mask(layout, window).to_dense()[:, 0].bool(), blocks.is_kept)


def test_blocks_beyond_the_window_and_of_other_documents_are_skipped():
    assert int(kept_blocks(plain(1280), None).is_kept.sum()) == 55
    assert int(kept_blocks(plain(1280), None).is_whole.sum()) == 45
    assert int(kept_blocks(plain(1280), 128).is_kept.sum()) == 19
    positions = torch.arange(1280)[None] % 256
    packed = sequence_layout((1, 1280), torch.device("cpu"), positions)
    assert int(kept_blocks(packed, None).is_kept.sum()) == 15


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return output


def test_the_masks_of_a_long_pack_take_no_quadratic_memory():
    length = 16384
    positions = torch.arange(length)[None] % 700
    layout = sequence_layout((1, length), torch.device("cpu"), positions)
    with _Largest() as seen:
        block_mask(layout, 512)
    # linear in the tokens, and one entry a pair of blocks; torch adds a column of blocks
    assert seen.num_elements <= max(length, (length // BLOCK_SIZE + 1) ** 2)


def test_a_model_computes_the_same_with_flex_and_without_gradients_only():
    model, expected = our_model(attention="flex"), our_model()
    ids = random_ids(2, 150)
    positions = torch.arange(150).remainder(60).expand(2, 150)
    with torch.no_grad():
        assert deviation(model(ids, positions).logits, expected(ids, positions).logits) <= TOLERANCE
    with pytest.raises(RuntimeError, match=r"attention=flex cannot train on a CPU.*attention=sdpa"):
        model(ids)


@torch.no_grad()
def test_flex_computes_in_the_dtype_of_autocast():
    # without experts: bf16 flips some of those that are chosen
    model, expected = (our_model(attention=name, num_dense_layers=5) for name in ("flex", "reference"))
    ids = random_ids(1, 40)
    with torch.autocast("cpu", torch.bfloat16):
        # scores are fp32 in the one and bf16 in the other; measured 1.1e-2
        assert deviation(model(ids).logits, expected(ids).logits) <= 5e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": CPU}, "cannot train on a CPU"),
        ({"hardware": H200, "dropout": 0.1}, "model.attention_dropout is 0.1"),
        ({"hardware": H200, "head_dim": 8}, "head_dim of at least 16"),
    ],
)
def test_what_flex_cannot_train_is_refused(options: dict, message: str):
    config = registry.configure("attention", "flex")
    plugin = registry.plugin_of(config)
    usual = {"hardware": H200, "head_dim": 128, "dropout": 0.0, "is_training": True}
    check_attention(plugin, config, **usual)
    check_attention(plugin, config, **usual | {"hardware": CPU, "is_training": False})
    with pytest.raises(RuntimeError, match=message):
        check_attention(plugin, config, **usual | options)


def test_flex_says_once_what_it_is_on_a_cpu(caplog: pytest.LogCaptureFixture):
    _say_once_what_a_cpu_does.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            mixed_by("flex", plain(5), 2, is_sliding=True)
    assert [record.getMessage() for record in caplog.records] == [
        "attention=flex on a CPU is torch's unfused form: forward only, in memory quadratic in the sequence"
    ]


@pytest.mark.slow
@pytest.mark.skipif(not has_cxx_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("is_sliding", [False, True], ids=["full", "sliding"])
def test_the_compiled_kernel_which_skips_blocks_equals_reference(is_sliding: bool):
    layout, window = packed_and_padded(700), 150
    plugin = registry.build(registry.configure("attention", "flex"), window=window)
    found = torch.compile(mixed, fullgraph=True)(plugin, layout, is_sliding)[layout.token_mask_BS]
    expected = mixed_by("reference", layout, window, is_sliding)[layout.token_mask_BS]
    # measured 1.4e-7
    assert deviation(found, expected) <= 1e-6
