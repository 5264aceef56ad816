"""`attention=flash`: what it hands to the package's kernel, with a plain kernel in the package's place."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from parity import TOLERANCE, deviation
from torch import Tensor

from afmoe import AfmoeConfig, AfmoeForCausalLM, registry
from afmoe.attention import check_attention
from afmoe.attention.layout import SequenceLayout, sequence_layout
from afmoe.attention.softmax import attend
from afmoe.attention.varlen import sequences, varlen_attention
from afmoe.hardware import Hardware

H200 = Hardware(device_type="cuda", capability=(9, 0))
WINDOW = 16


def plain_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """`flash_attn_varlen_func` as its docstring describes it: one sequence at a time, aligned at the end."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q[-1]) == q.shape[0]
    assert int(cu_seqlens_k[-1]) == k.shape[0] == v.shape[0]
    outputs = []
    ends = zip(
        itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
    )
    for (q_start, q_end), (k_start, k_end) in ends:
        num_queries, num_keys = q_end - q_start, k_end - k_start
        assert 0 < num_queries <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        places = torch.arange(num_queries)[:, None] + num_keys - num_queries
        keys = torch.arange(num_keys)
        mask = keys <= places if causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
        if window_size[0] >= 0:
            mask = mask & (keys >= places - window_size[0])
        if window_size[1] >= 0:
            mask = mask & (keys <= places + window_size[1])
        q_row, k_row, v_row = q[None, q_start:q_end], k[None, k_start:k_end], v[None, k_start:k_end]
        outputs.append(attend(q_row, k_row, v_row, mask[None], dropout_p)[0])
    return torch.cat(outputs)


def packed(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


LENGTH = 60
LAYOUTS = {
    "plain": (None, None),
    "packed": (packed([[1, 20, 39], [60], [16, 16, 28]]), None),
    "left_padded": (None, torch.arange(LENGTH) >= torch.tensor([[0], [25], [59]])),
    "packed_and_padded": (
        packed([[1, 20, 30, 9], [50, 10], [16, 16, 28]]),
        torch.arange(LENGTH) < torch.tensor([[51], [50], [60]]),
    ),
    "a_row_of_padding": (
        packed([[1, 20, 39], [60], [60]]),
        torch.tensor([[True], [False], [True]]).expand(3, 60),
    ),
    "nothing_but_padding": (None, torch.zeros(3, LENGTH, dtype=torch.bool)),
}


def both(layout: SequenceLayout, is_sliding: bool, num_keys: int) -> list[list[Tensor]]:
    """Outputs, zero on padding, and gradients: by the varlen path and by `reference`."""
    shapes = [(3, layout.num_queries, 4, 8), (3, num_keys, 2, 8), (3, num_keys, 2, 8)]
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    real = layout.token_mask_BS
    real = torch.ones(3, layout.num_queries, dtype=torch.bool) if real is None else real
    projection = torch.randn(shapes[0]) * real[:, :, None, None]
    window = WINDOW if is_sliding else None
    found = varlen_attention(plain_kernel, *operands, sequences(layout, window), window=window, dropout=0.0)
    plugin = registry.build(registry.configure("attention", "reference"), window=WINDOW)
    expected = plugin(*operands, plugin.prepare(layout), is_sliding=is_sliding, dropout=0.0)
    assert bool((found[~real] == 0).all())
    if not bool(real.any()):
        return [[found[real]], [expected[real]]]
    return [
        [mixed[real], *torch.autograd.grad((mixed * projection).sum(), operands)]
        for mixed in (found, expected)
    ]


@pytest.mark.parametrize("is_sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_sequences_of_a_batch_give_what_reference_gives(name: str, is_sliding: bool):
    layout = sequence_layout((3, LENGTH), torch.device("cpu"), *LAYOUTS[name])
    found, expected = both(layout, is_sliding, LENGTH)
    # measured 2e-7
    assert max(map(deviation, found, expected)) <= TOLERANCE


@pytest.mark.parametrize("is_sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_new_tokens_behind_a_cache_give_what_reference_gives(name: str, num_new: int, is_sliding: bool):
    if name == "nothing_but_padding":
        return
    from afmoe.attention.cache import GrowingCache

    cache = GrowingCache([WINDOW])
    cache.extend(sequence_layout((3, LENGTH), torch.device("cpu"), *LAYOUTS[name]))
    layout = cache.extend(sequence_layout((3, num_new), torch.device("cpu")))
    num_keys = layout.num_keys - layout.first_key(WINDOW if is_sliding else None)
    found, expected = both(layout, is_sliding, num_keys)
    assert max(map(deviation, found, expected)) <= TOLERANCE


def test_documents_and_padding_become_sequences():
    taken = sequences(sequence_layout((3, LENGTH), torch.device("cpu"), *LAYOUTS["packed_and_padded"]), None)
    assert taken.query_ends.tolist() == [0, 1, 21, 51, 101, 117, 133, 161]
    assert taken.longest_query == 50
    assert taken.query_indices.tolist() == [*range(51), *range(60, 110), *range(120, 180)]
    whole = sequences(sequence_layout((3, LENGTH), torch.device("cpu")), None)
    assert whole.query_indices is None
    assert whole.key_ends.tolist() == [0, 60, 120, 180]


def test_a_border_taken_away_is_seen():
    layout = sequence_layout((3, LENGTH), torch.device("cpu"), *LAYOUTS["packed"])
    taken = sequences(sequence_layout((3, LENGTH), torch.device("cpu")), None)
    operands = [torch.randn(3, LENGTH, heads, 8) for heads in (4, 2, 2)]
    found = varlen_attention(plain_kernel, *operands, taken, window=None, dropout=0.0)
    plugin = registry.build(registry.configure("attention", "reference"), window=WINDOW)
    expected = plugin(*operands, plugin.prepare(layout), is_sliding=False, dropout=0.0)
    # measured 0.6
    assert deviation(found, expected) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("hardware", "head_dim", "message"),
    [
        (
            Hardware(device_type="cpu"),
            128,
            "needs a CUDA GPU of sm_80 or newer, this machine's device is cpu",
        ),
        (Hardware(device_type="cuda", capability=(7, 5)), 128, "device is sm_75; use attention=sdpa"),
        (H200, 512, "head_dim of at most 256, model.head_dim is 512"),
    ],
)
def test_what_flash_cannot_run_is_refused(hardware: Hardware, head_dim: int, message: str):
    config = registry.configure("attention", "flash")
    with pytest.raises(RuntimeError, match=message):
        check_attention(registry.plugin_of(config), config, hardware=hardware, head_dim=head_dim, dropout=0.0)


def test_a_model_with_flash_is_refused_before_it_is_built():
    with pytest.raises(RuntimeError, match="attention=flash needs a CUDA GPU"):
        AfmoeForCausalLM(AfmoeConfig(), attention="flash", hardware=Hardware(device_type="cpu"))


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_without_the_package_flash_names_it():
    config = registry.configure("attention", "flash")
    plugin = registry.plugin_of(config)
    with pytest.raises(RuntimeError, match=r"needs the package flash-attn.*pip install flash-attn"):
        check_attention(plugin, config, hardware=H200, head_dim=128, dropout=0.0)
    with pytest.raises(RuntimeError, match="needs the package flash-attn"):
        registry.build(config, window=16, hardware=H200)
