"""Packs as tensors, and how a step's packs are dealt to micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afmoe.data.batches import PackBatches, PackLoader, StepLayout, make_batch
from afmoe.data.plan import plan_epoch
from afmoe.data.token_rows import TokenRows

LAYOUTS = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]


def token_rows(*rows: tuple[list[int], list[int]]) -> TokenRows:
    return TokenRows(
        np.array([token for ids, _ in rows for token in ids], dtype=np.int32),
        np.array([label for _, labels in rows for label in labels], dtype=bool),
        np.cumsum([0, *(len(ids) for ids, _ in rows)]),
    )


def many_rows(count: int) -> TokenRows:
    """Row n holds 2 to 6 tokens, all n + 1, its last one trained."""
    lengths = [2 + number % 5 for number in range(count)]
    return token_rows(*(([number + 1] * n, [0] * (n - 1) + [1]) for number, n in enumerate(lengths)))


def pack_batches(
    rows: TokenRows, layout: tuple[int, int, int], rank: int = 0, consumed: int = 0
) -> PackBatches:
    plan = plan_epoch(rows.lengths, sequence_length=12, packing=True, seed=0, epoch=0)
    step_layout = StepLayout(*layout)
    return PackBatches(
        rows, plan, step_layout, rank=rank, pad_token_id=0, pack_length=12, packs_consumed=consumed
    )


def global_steps(rows: TokenRows, layout: tuple[int, int, int], consumed: int = 0) -> list[torch.Tensor]:
    """The packs [P, S] of each optimizer step, in a canonical order, over all ranks and micro-batches."""
    batch_size, accumulate, world_size = layout
    ranks = [list(PackLoader(pack_batches(rows, layout, rank, consumed))) for rank in range(world_size)]
    steps = []
    for start in range(0, len(ranks[0]), accumulate):
        batches = [batch for rank in ranks for batch in rank[start : start + accumulate]]
        packs = torch.cat([batch["input_ids"] for batch in batches])
        assert {len(batch["input_ids"]) for batch in batches} == {batch_size}
        # every batch of the step knows the figures of the whole step
        assert {batch["num_real_tokens"] for batch in batches} == {int((packs != 0).sum())}
        num_labels = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert {batch["num_label_tokens"] for batch in batches} == {num_labels}
        steps.append(packs[np.lexsort(packs.numpy().T)])
    return steps


def test_a_hand_made_pack_becomes_exactly_these_tensors():
    rows = token_rows(([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1]), ([3, 4], [0, 1]))
    batch = make_batch(rows, [np.array([1, 0]), np.array([2]), np.array([], dtype=np.int64)], 0, 7)
    expected = {
        "input_ids": [[8, 9, 5, 6, 7, 0, 0], [3, 4, 0, 0, 0, 0, 0], [0] * 7],
        "position_ids": [[0, 1, 0, 1, 2, 0, 1], [0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]],
        "labels": [[-100, 9, -100, 6, 7, -100, -100], [-100, 4] + [-100] * 5, [-100] * 7],
        "document_ids": [[1, 1, 0, 0, 0, -1, -1], [2, 2] + [-1] * 5, [-1] * 7],
        "attention_mask": [[True] * 5 + [False] * 2, [True] * 2 + [False] * 5, [False] * 7],
    }
    assert {key: value.tolist() for key, value in batch.items()} == expected
    assert {key: value.dtype for key, value in batch.items()} == {
        key: torch.bool if key == "attention_mask" else torch.int64 for key in expected
    }


def test_without_a_pack_length_the_longest_row_gives_it():
    rows = token_rows(([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1]))
    assert make_batch(rows, [np.array([0]), np.array([1])], 0, None)["input_ids"].tolist() == [
        [5, 6, 7],
        [8, 9, 0],
    ]
    empty = np.array([], dtype=np.int64)
    assert make_batch(rows, [empty, empty], 0, None)["attention_mask"].tolist() == [[False], [False]]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_step_has_the_same_packs_however_they_are_dealt(layout: tuple[int, int, int]):
    rows = many_rows(100)
    reference, steps = global_steps(rows, LAYOUTS[0]), global_steps(rows, layout)
    assert len(reference) == len(steps) > 5
    assert all(torch.equal(a, b) for a, b in zip(reference, steps, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pass_has_every_row_once_and_ends_with_a_whole_step(layout: tuple[int, int, int]):
    rows = many_rows(101)
    packs = torch.cat(global_steps(rows, layout))
    assert len(packs) % 4 == 0
    tokens, counts = packs[packs != 0].unique(return_counts=True)
    assert tokens.tolist() == list(range(1, 102))
    assert counts.tolist() == rows.lengths.tolist()


def test_a_rank_without_any_row_in_the_last_step_gets_a_batch_of_padding():
    rows = many_rows(1)
    [batch] = PackLoader(pack_batches(rows, (1, 1, 2), rank=1))
    assert not batch["attention_mask"].any()
    assert (batch["num_label_tokens"], batch["num_real_tokens"]) == (1, 2)
    assert batch["num_own_label_tokens"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pass_continued_after_some_steps_has_the_same_batches(layout: tuple[int, int, int]):
    rows = many_rows(100)
    for rank in range(layout[2]):
        whole = PackLoader(pack_batches(rows, layout, rank))
        rest = PackLoader(pack_batches(rows, layout, rank, consumed=12))
        assert len(rest) == len(whole)
        batches_done = 3 * layout[1]
        for expected, batch in zip(list(whole)[batches_done:], rest, strict=True):
            assert all(
                torch.equal(torch.as_tensor(expected[key]), torch.as_tensor(batch[key])) for key in expected
            )


def test_a_pass_continued_with_another_step_size_has_the_rest_of_the_rows_once():
    rows = many_rows(100)
    before = global_steps(rows, (4, 1, 1))[:3]
    after = global_steps(rows, (5, 1, 2), consumed=12)
    packs = torch.cat([*before, *after])
    assert packs[packs != 0].unique(return_counts=True)[1].tolist() == rows.lengths.tolist()
    loader = PackLoader(pack_batches(rows, (5, 1, 2), consumed=12))
    # 12 packs are more than one step of 10, so the trainer counts two as done
    assert len(loader) == 2 + len(after)
    assert len(list(loader)) == len(after)


def test_a_pass_that_was_finished_has_no_batch_left():
    rows = many_rows(10)
    whole = pack_batches(rows, (4, 1, 1))
    finished = PackLoader(pack_batches(rows, (4, 1, 1), consumed=4 * len(whole)))
    assert len(finished) == len(whole)
    assert list(finished) == []
