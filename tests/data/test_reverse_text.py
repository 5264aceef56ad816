"""The embedded source: real text, reversed exactly, nothing held out seen in training."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from afmoe.data.reverse_text import ReverseText, is_held_out_topic, read_paragraphs
from afmoe.errors import ConfigError
from afmoe.registry import build, configure


def source(seed: int = 0, **options: Any) -> ReverseText:
    return build(configure("data", {"name": "reverse_text", **options}), seed=seed)


def pieces(rows: Any) -> list[str]:
    return [row.messages[-2]["content"] for row in rows]


def test_the_answer_is_the_piece_reversed_character_by_character():
    for row in islice(source().train_rows(), 200):
        assert [message["role"] for message in row.messages] == ["user", "assistant"]
        assert row.messages[1]["content"] == row.messages[0]["content"][::-1]


def test_pieces_are_of_the_asked_lengths_start_with_a_word_and_stand_where_their_origin_says():
    text = {line: paragraph for _, line, paragraph in read_paragraphs()}
    rows = list(islice(source(min_length=4, max_length=6).train_rows(), 500))
    for row in rows:
        piece, line = row.messages[0]["content"], int(row.origin.removeprefix("pydoc_topics.txt:"))
        assert piece == piece.strip()
        assert f" {piece}" in f" {text[line]}"
    assert {len(piece) for piece in pieces(rows)} == {4, 5, 6}


def test_no_held_out_string_and_no_held_out_topic_occurs_in_training():
    split = source()
    held_out = list(split.validation_rows())
    train = list(split.train_rows())
    assert not set(pieces(held_out)) & set(pieces(train))
    topics = {line: topic for topic, line, _ in read_paragraphs()}
    assert all(is_held_out_topic(topics[int(row.origin.split(":")[1])]) for row in held_out)
    assert not any(is_held_out_topic(topics[int(row.origin.split(":")[1])]) for row in train)


def test_no_paragraph_stands_in_two_topics():
    paragraphs = [text for _, _, text in read_paragraphs()]
    assert len(paragraphs) == len(set(paragraphs)) > 500


def test_256_different_strings_are_held_out_whatever_the_seed():
    strings = pieces(source(seed=1).validation_rows())
    assert len(set(strings)) == len(strings) == 256
    assert strings == pieces(source(seed=2).validation_rows())


def test_training_rows_depend_on_the_seed_alone():
    first = pieces(islice(source(seed=1).train_rows(), 100))
    assert first == pieces(islice(source(seed=1).train_rows(), 100))
    assert first != pieces(islice(source(seed=2).train_rows(), 100))


def test_as_many_rows_as_asked_for():
    split = source(num_train_rows=17, num_validation_rows=0)
    assert (len(list(split.train_rows())), len(list(split.validation_rows()))) == (17, 0)
    assert "17 pieces of 3-10 characters" in split.description


def test_a_system_message_precedes_every_row():
    split = source(system="Reverse.", num_train_rows=2)
    assert all(row.messages[0] == {"role": "system", "content": "Reverse."} for row in split.train_rows())


@pytest.mark.parametrize(
    "options", [{"min_length": 0}, {"min_length": 11}, {"num_train_rows": 0}, {"num_validation_rows": -1}]
)
def test_impossible_options_are_refused(options: dict[str, int]):
    with pytest.raises(ConfigError, match=f"data.{next(iter(options))} must"):
        configure("data", {"name": "reverse_text", **options})


def test_more_held_out_strings_than_the_text_has_are_refused():
    with pytest.raises(ConfigError, match="too few different pieces for 500 rows"):
        list(source(min_length=1, max_length=1, num_validation_rows=500).validation_rows())


def test_pieces_longer_than_any_paragraph_are_refused():
    with pytest.raises(ConfigError, match=r"no paragraph has data\.min_length=100000 characters"):
        next(source(min_length=100000, max_length=100000).train_rows())
