"""Packed documents and padding: nothing is seen across a border, on every attention plugin."""

from __future__ import annotations

import pytest
import torch
from parity import SMALL, TOLERANCE, deviation, gradient_deviation, gradients, our_model, random_ids
from torch import Tensor

from afmoe import AfmoeForCausalLM, registry
from afmoe.attention.layout import sequence_layout
from afmoe.moe.statistics import count_routing

PLUGINS = ["reference", "sdpa"]
WINDOW = SMALL["sliding_window"]
# below, at and beyond the window (16) and the block of a sliding layer in sdpa (64)
DOCUMENTS = [1, 40, WINDOW, 100, 3, WINDOW + 1, 2, 150]


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def objective(logits: Tensor, seed: int) -> Tensor:
    """A fixed random projection: every logit matters."""
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))).sum()


def one_at_a_time(model: AfmoeForCausalLM, documents: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outputs = [model(document).logits for document in documents]
    sum(objective(logits, seed) for seed, logits in enumerate(outputs)).backward()
    return [logits.detach() for logits in outputs], gradients(model)


@pytest.mark.parametrize("attention", PLUGINS)
def test_packed_documents_equal_one_document_at_a_time(attention: str):
    model = our_model(attention=attention)
    ids = random_ids(1, sum(DOCUMENTS))
    documents = list(ids.split(DOCUMENTS, dim=1))
    expected, expected_gradients = one_at_a_time(model, documents)
    model.zero_grad()
    packed = model(ids, positions_of(DOCUMENTS)).logits.split(DOCUMENTS, dim=1)
    sum(objective(logits, seed) for seed, logits in enumerate(packed)).backward()
    # measured 9e-7 for outputs, 8e-7 for gradients
    assert max(map(deviation, packed, expected)) <= TOLERANCE
    assert gradient_deviation(gradients(model), expected_gradients) <= TOLERANCE
    # the mask taken away (one document of that length): this is what a leak looks like; measured 1.4
    leaking = model(ids).logits.split(DOCUMENTS, dim=1)
    assert max(map(deviation, leaking, expected)) > 100 * TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("with_positions", [False, True], ids=["mask_only", "with_positions"])
@pytest.mark.parametrize("attention", PLUGINS)
def test_padded_rows_equal_one_row_at_a_time(attention: str, with_positions: bool, side: str):
    model = our_model(attention=attention)
    lengths, width = [37, 150, 1], 150
    documents = [random_ids(1, length, seed=length) for length in lengths]
    expected, expected_gradients = one_at_a_time(model, documents)
    ids = torch.full((3, width), 5)
    mask = torch.zeros(3, width, dtype=torch.int64)
    positions = torch.zeros(3, width, dtype=torch.int64)
    places = [slice(width - n, width) if side == "left" else slice(0, n) for n in lengths]
    for row, (document, place) in enumerate(zip(documents, places, strict=True)):
        ids[row, place] = document
        mask[row, place] = 1
        positions[row, place] = torch.arange(document.shape[1])
    model.zero_grad()
    output = model(ids, positions if with_positions else None, attention_mask=mask)
    found = [output.logits[row : row + 1, place] for row, place in enumerate(places)]
    sum(objective(logits, seed) for seed, logits in enumerate(found)).backward()
    # measured 6e-7 for outputs, 9e-7 for gradients
    assert max(map(deviation, found, expected)) <= TOLERANCE
    assert gradient_deviation(gradients(model), expected_gradients) <= TOLERANCE
    assert bool(output.logits.isfinite().all())
    if side == "left":
        # without the mask the padding is seen; measured 1.1
        leaking = model(ids).logits
        assert deviation(leaking[:1, places[0]], expected[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("is_sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("window", [5, 16, 70])
def test_sdpa_equals_reference_with_borders_at_every_position_modulo_the_window(
    window: int, is_sliding: bool
):
    # row r: documents of r + 1, window and the rest, padding behind; long enough for blocks
    length = 2 * max(window, 64) + window + 3
    rows = []
    for first in range(1, window + 1):
        rest = length - first - window - 4
        rows.append(positions_of([first, window, rest, 4]))
    positions = torch.cat(rows)
    mask = torch.ones_like(positions)
    mask[:, -4:] = 0
    layout = sequence_layout((len(rows), length), torch.device("cpu"), positions, mask)
    shapes = [(len(rows), length, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    projection = torch.randn(shapes[0]) * mask[:, :, None, None]
    results = []
    for name in PLUGINS:
        plugin = registry.build(registry.configure("attention", name), window=window)
        output = plugin(*inputs, plugin.prepare(layout), is_sliding=is_sliding, dropout=0.0)
        results.append(
            [output * mask[:, :, None, None], *torch.autograd.grad((output * projection).sum(), inputs)]
        )
    # measured 4e-7
    assert max(map(deviation, results[1], results[0])) <= TOLERANCE


def test_a_label_at_a_documents_first_token_or_on_padding_is_ignored():
    model = our_model()
    ids = random_ids(1, 20)
    positions = positions_of([8, 9, 3])
    mask = torch.tensor([[1] * 17 + [0] * 3])
    output = model(ids, positions, ids, attention_mask=mask, return_logits=True)
    assert output.num_labels.item() == 7 + 8
    log_probabilities = output.logits.log_softmax(-1)
    expected = -sum(log_probabilities[0, index, ids[0, index + 1]] for index in [*range(7), *range(8, 16)])
    assert deviation(output.loss_sum, expected) <= TOLERANCE
    assert deviation(output.loss, expected / 15) <= TOLERANCE


def test_left_padding_makes_the_first_real_token_a_documents_first():
    model = our_model()
    ids = random_ids(1, 12)
    mask = torch.tensor([[0] * 4 + [1] * 8])
    padded = model(ids, labels=ids, attention_mask=mask)
    alone = model(ids[:, 4:], labels=ids[:, 4:])
    assert padded.num_labels.item() == 7
    assert deviation(padded.loss, alone.loss) <= TOLERANCE


def test_a_batch_without_labels_has_zero_loss_and_zero_gradients():
    model = our_model()
    ids = random_ids(2, 9)
    output = model(ids, labels=torch.full_like(ids, -100))
    output.loss.backward()
    assert output.loss.item() == 0
    assert output.num_labels.item() == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients(model).values())


def test_a_row_of_padding_only_is_legal_and_counts_nowhere():
    model = our_model()
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with count_routing(model):
        output = model(ids, labels=ids, attention_mask=mask)
    output.loss.backward()
    assert output.num_labels.item() == 8
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model).values())
    alone = model(ids[:1], labels=ids[:1])
    assert deviation(output.loss, alone.loss) <= TOLERANCE


def test_what_stands_on_padding_changes_nothing():
    model = our_model()
    ids = random_ids(1, 30)
    other = ids.clone()
    other[0, 20:] = 1
    mask = torch.tensor([[1] * 20 + [0] * 10])
    first, second = (model(tokens, attention_mask=mask).logits[:, :20] for tokens in (ids, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_rotary_types_that_follow_the_longest_document_refuse_packs_that_are_too_long(name: str):
    rope = {"rope_type": name, "rope_theta": 1e4, "factor": 2.0}
    if name == "longrope":
        rope |= {"original_max_position_embeddings": 32, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = our_model(rope_parameters=rope, max_position_embeddings=32)
    ids = random_ids(1, 60)
    documents = list(ids.split([30, 30], dim=1))
    expected, _ = one_at_a_time(model, documents)
    packed = model(ids, positions_of([30, 30])).logits.split([30, 30], dim=1)
    assert max(map(deviation, packed, expected)) <= TOLERANCE
    with pytest.raises(ValueError, match="cannot pack documents longer than 32"):
        model(ids, positions_of([33, 27]))
