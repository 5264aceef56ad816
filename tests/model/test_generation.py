"""Greedy generation against transformers', and sampling."""

from __future__ import annotations

import pytest
import torch
from parity import TOLERANCE, deviation, our_model, pair, random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from afmoe import registry
from afmoe.generation import Sampling
from afmoe.hardware import has_cxx_compiler

CACHES = ["growing", "static"]


def left_padded(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(len(lengths), width, seed=3)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids, mask


def their_greedy(model, ids: torch.Tensor, mask: torch.Tensor, **options) -> torch.Tensor:
    options = {"pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, do_sample=False, **options)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_greedy_equals_transformers_past_the_window(attention: str, cache: str):
    # prompt shorter than the window (16), new tokens far beyond it
    ours, theirs = pair(attention=attention)
    ids = random_ids(2, 10)
    expected = their_greedy(theirs, ids, torch.ones_like(ids), max_new_tokens=40)
    assert torch.equal(ours.generate(ids, 40, cache=cache), expected)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [1, 2, 3, 200])
def test_greedy_equals_transformers_at_odd_windows(window: int, cache: str):
    ours, theirs = pair(sliding_window=window)
    ids, mask = left_padded([24, 3, 17, 1], 24)
    # transformers' own cache keeps everything at a window of 1 (a slice that begins at -0)
    expected = their_greedy(theirs, ids, mask, max_new_tokens=20, use_cache=window > 1)
    assert torch.equal(ours.generate(ids, 20, attention_mask=mask, cache=cache), expected)


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_equals_transformers_on_a_left_padded_batch(cache: str):
    ours, theirs = pair()
    ids, mask = left_padded([24, 3, 17, 1], 24)
    found = ours.generate(ids, 40, attention_mask=mask, cache=cache)
    assert torch.equal(found, their_greedy(theirs, ids, mask, max_new_tokens=40))
    # a row gives the same tokens alone
    alone = ours.generate(ids[2:3, -17:], 40, cache=cache)
    assert torch.equal(found[2:3, -57:], alone)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["reference", "sdpa", "flex"])
def test_two_hundred_greedy_tokens_equal_transformers(attention: str, cache: str):
    ours, theirs = pair(attention=attention, sliding_window=32)
    ids, mask = left_padded([40, 33, 8, 1], 40)
    expected = their_greedy(theirs, ids, mask, max_new_tokens=200)
    assert torch.equal(ours.generate(ids, 200, attention_mask=mask, cache=cache), expected)


@pytest.mark.slow
@pytest.mark.skipif(not has_cxx_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_two_hundred_greedy_tokens_by_a_compiled_step_equal_transformers(attention: str):
    ours, theirs = pair(attention=attention, sliding_window=32)
    ids, mask = left_padded([40, 33, 8, 1], 40)
    expected = their_greedy(theirs, ids, mask, max_new_tokens=200)
    torch.compiler.reset()
    options = {"attention_mask": mask, "cache": "static", "compile": True}
    assert torch.equal(ours.generate(ids, 200, **options), expected)
    # a second call of nearly the same length, with other rows ending, compiles nothing
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(ours.generate(ids, 190, **options), expected[:, :230])


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn"])
def test_greedy_equals_transformers_with_scaled_rotary_embedding(rope: str, cache: str):
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    ours, theirs = pair(rope_parameters=parameters, max_position_embeddings=30)
    ids, mask = left_padded([20, 12], 20)
    expected = their_greedy(theirs, ids, mask, max_new_tokens=50)
    assert torch.equal(ours.generate(ids, 50, attention_mask=mask, cache=cache), expected)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("as_list", [False, True])
def test_a_row_that_ended_is_filled_with_padding(as_list: bool, cache: str):
    ours, theirs = pair()
    ids = random_ids(3, 6)
    free = ours.generate(ids, 20)
    # a token that some row produces early and another does not
    eos = next(int(token) for token in free[0, 8:14] if token not in free[1, 6:])
    stops = [eos, 96] if as_list else eos
    found = ours.generate(ids, 20, eos_token_id=stops, pad_token_id=1, cache=cache)
    expected = their_greedy(
        theirs, ids, torch.ones_like(ids), max_new_tokens=20, eos_token_id=stops, pad_token_id=1
    )
    assert torch.equal(found, expected)
    end = int((found[0, 6:] == eos).nonzero()[0]) + 7
    assert bool((found[0, end:] == 1).all())


def test_generation_ends_when_every_row_has():
    model = our_model()
    ids = random_ids(1, 6)
    eos = int(model.generate(ids, 3)[0, -1])
    found = model.generate(ids, 20, eos_token_id=eos)
    assert found.shape[1] <= 9
    assert found[0, -1] == eos


def test_stop_and_pad_tokens_default_to_those_of_the_config():
    model = our_model()
    ids = random_ids(2, 6)
    free = model.generate(ids, 10)
    model.config.eos_token_id, model.config.pad_token_id = int(free[0, 8]), 5
    assert torch.equal(
        model.generate(ids, 10),
        model.generate(ids, 10, eos_token_id=int(free[0, 8]), pad_token_id=5),
    )


def test_sliding_layers_keep_only_their_window():
    model = our_model()
    cache = model.model.new_cache()
    model.model(random_ids(1, 100), cache=cache)
    model.model(random_ids(1, 1), cache=cache)
    kept = [layer.key_BSGC.shape[1] for layer in cache.layers]
    assert kept == [15, 15, 15, 101, 15]


def test_a_static_cache_is_made_once_and_its_rings_are_as_long_as_the_window():
    model = our_model()
    cache = model.model.new_cache(max_tokens=200)
    model.model(random_ids(1, 100), cache=cache)
    before = [(layer.key_BSGC.shape[1], layer.key_BSGC.data_ptr()) for layer in cache.layers]
    for _ in range(3):
        model.model(random_ids(1, 1), cache=cache)
    assert [size for size, _ in before] == [16, 16, 16, 256, 16]
    assert [(layer.key_BSGC.shape[1], layer.key_BSGC.data_ptr()) for layer in cache.layers] == before


@pytest.mark.parametrize("cache", CACHES)
def test_a_pack_is_continued_behind_its_last_document(cache: str):
    model = our_model()
    ids, positions = random_ids(1, 50), torch.cat((torch.arange(29), torch.arange(21)))[None]
    kept = model.model.new_cache(None if cache == "growing" else 60)
    model.model(ids, positions, cache=kept)
    alone = model.model.new_cache()
    model.model(ids[:, 29:], cache=alone)
    for token in random_ids(1, 5, seed=4)[0]:
        found, expected = (
            model.model(token.view(1, 1), cache=each).last_hidden_state for each in (kept, alone)
        )
        # measured 3e-7
        assert deviation(found, expected) <= TOLERANCE


def test_what_a_static_cache_cannot_take_is_named():
    model = our_model()
    cache = model.model.new_cache(max_tokens=10)
    with pytest.raises(ValueError, match=r"a prompt of 200 tokens.*capacity of 128"):
        model.model(random_ids(1, 200), cache=cache)
    model.model(random_ids(1, 100), cache=cache)
    with pytest.raises(ValueError, match="one token a row, got 2; use cache=growing"):
        model.model(random_ids(1, 2), cache=cache)
    with pytest.raises(ValueError, match="attention=flex cannot be in a compiled step on a CPU"):
        our_model(attention="flex").generate(random_ids(1, 3), cache="static", compile=True)
    flash = registry.find("attention", "flash")
    assert "use cache=growing" in flash.why_no_static_cache(device_type="cuda", is_compiled=False)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="compile=True cannot serve rope_type=dynamic"):
        our_model(rope_parameters=rope).generate(random_ids(1, 3), cache="static", compile=True)


def test_steps_wait_for_the_device_only_where_there_are_stop_tokens():
    model = our_model()
    ids = random_ids(2, 6)

    class Waits(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            # a boolean or a number on the host is read by this operation
            self.num += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def num_waits(num_tokens: int, **options) -> int:
        with Waits() as waits:
            model.generate(ids, num_tokens, **options)
        return waits.num

    for cache in CACHES:
        assert num_waits(7, cache=cache) == num_waits(3, cache=cache)
        assert num_waits(7, cache=cache, eos_token_id=200) == num_waits(3, cache=cache, eos_token_id=200) + 4


@pytest.mark.parametrize("attention", ["reference", "sdpa", "flex"])
@torch.no_grad()
def test_several_new_tokens_behind_a_cache_equal_one_forward(attention: str):
    model = our_model(attention=attention)
    ids, mask = left_padded([50, 20], 50)
    whole = model.model(ids, attention_mask=mask).last_hidden_state
    cache = model.model.new_cache()
    first = model.model(ids[:, :33], attention_mask=mask[:, :33], cache=cache).last_hidden_state
    rest = [model.model(part, cache=cache).last_hidden_state for part in ids[:, 33:].split([10, 1, 6], dim=1)]
    found = torch.cat([first, *rest], dim=1)
    # measured 5e-7
    assert deviation(found[mask.bool()], whole[mask.bool()]) <= TOLERANCE


def test_generation_leaves_the_mode_and_ignores_dropout():
    model = our_model(attention_dropout=0.5)
    ids = random_ids(2, 6)
    expected = model.generate(ids, 10)
    model.train()
    assert torch.equal(model.generate(ids, 10), expected)
    assert model.training


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    model = our_model()
    ids = random_ids(2, 6)
    greedy = model.generate(ids, 10)
    assert torch.equal(model.generate(ids, 10, temperature=2.0, top_k=1), greedy)
    assert torch.equal(model.generate(ids, 10, temperature=2.0, top_p=1e-6), greedy)


def test_sampling_draws_from_the_cut_distribution():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[None].expand(20_000, 4)

    def frequencies(**options) -> torch.Tensor:
        drawn = Sampling(**options).choose(logits)
        return torch.bincount(drawn, minlength=4) / drawn.shape[0]

    # four standard deviations of a frequency near 1/2 over 20,000 draws: 0.014
    near = {"atol": 0.015, "rtol": 0.0}
    assert torch.allclose(frequencies(temperature=1.0), torch.tensor([0.5, 0.25, 0.15, 0.1]), **near)
    assert torch.allclose(frequencies(temperature=1.0, top_k=2), torch.tensor([2 / 3, 1 / 3, 0, 0]), **near)
    assert torch.allclose(
        frequencies(temperature=1.0, top_p=0.8), torch.tensor([5 / 9, 2.5 / 9, 1.5 / 9, 0]), **near
    )
    squared = torch.tensor([0.25, 0.0625, 0.0225, 0.01])
    assert torch.allclose(frequencies(temperature=0.5), squared / squared.sum(), **near)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must lie in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"cache": "statik"}, "cache must be growing or static, got statik"),
        ({"compile": True}, "compile=True needs cache=static"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padded on the left"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "padded on the left"),
        ({"attention_mask": torch.tensor([[1, 1]])}, "shape"),
    ],
)
def test_a_wrong_argument_is_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        our_model().generate(random_ids(1, 3), **options)
