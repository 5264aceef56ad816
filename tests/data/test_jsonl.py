"""Rows from files: every fault has its reason and its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afmoe.data.chat import ChatRenderer
from afmoe.data.rows import BadRow, Row
from afmoe.data.token_rows import tokenize_rows
from afmoe.data.tokenizer import load_tokenizer
from afmoe.errors import ConfigError
from afmoe.registry import build, configure

USER = {"role": "user", "content": "2+2"}
ASSISTANT = {"role": "assistant", "content": "4"}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]}


FAULTS: list[tuple[Any, str]] = [
    ({"messages": [USER, ASSISTANT]}, ""),
    ('{"messages": [', "bad JSON"),
    (b'{"messages": "\xff"}', "not UTF-8"),
    ([USER, ASSISTANT], "not an object"),
    ({"prompt": "2+2"}, "no messages"),
    ({"messages": None}, "no messages"),
    ({"messages": "2+2"}, "messages are no list"),
    ({"messages": []}, "empty conversation"),
    ({"messages": [USER, "4"]}, "message is no object"),
    ({"messages": [{"role": "wizard", "content": "2+2"}, ASSISTANT]}, "unknown role"),
    ({"messages": [{"content": "2+2"}, ASSISTANT]}, "unknown role"),
    ({"messages": [USER]}, "no assistant turn"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty answer"),
    ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "message without content"),
    ({"messages": [{"role": "user", "content": 4}, ASSISTANT]}, "content is no text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]}, "content part is no text"),
    (
        {"messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": 1}]},
        "reasoning_content is no text",
    ),
    (call("{"), "tool arguments are not JSON"),
    (call("[1]"), "tool arguments are no object"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool call without a name"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": "add"}]}, "tool_calls are no list of objects"),
    ({"messages": [USER, ASSISTANT], "tools": "["}, "tools are not JSON"),
    ({"messages": [USER, ASSISTANT], "tools": {"name": "add"}}, "tools are no list of objects"),
    (
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "4"}]}',
        "text is not valid Unicode",
    ),
    ({"messages": [{"role": "user", "content": "<|im_start|>"}, ASSISTANT]}, "control token in content"),
    ({"messages": [{"role": "user", "content": "2" * 100}, ASSISTANT]}, "too long"),
]


def write(path: Path, rows: list[Any]) -> Path:
    encoded = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
        for row in rows
    ]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def source(path: Path | list[str], **options: Any) -> Any:
    files = path if isinstance(path, list) else str(path)
    return build(configure("data", {"name": "jsonl", "train_files": files, **options}), seed=0)


def good(source: Any) -> list[Row]:
    rows = list(source.train_rows())
    assert not any(isinstance(row, BadRow) for row in rows)
    return rows


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"{index}"}, ASSISTANT]} for index in range(count)]


def test_every_fault_is_counted_under_its_reason_with_file_and_line(tmp_path: Path):
    path = write(tmp_path / "faulty.jsonl", [row for row, _ in FAULTS])
    config = configure("data", {"name": "jsonl", "train_files": str(path), "validation_fraction": 0.0})
    config.sequence_length, config.max_bad_fraction = 90, 0.99
    rows, report = tokenize_rows(
        build(config, seed=0).train_rows(), ChatRenderer(load_tokenizer()), config, "training"
    )
    expected: dict[str, list[str]] = {}
    for number, (_, reason) in enumerate(FAULTS, start=1):
        if reason:
            expected.setdefault(reason, []).append(f"{path}:{number}")
    assert {reason: dropped.first for reason, dropped in report.dropped.items()} == expected
    assert (report.read, report.used, len(rows)) == (len(FAULTS), 1, 1)


def test_of_many_bad_rows_the_first_three_are_named(tmp_path: Path):
    path = write(tmp_path / "faulty.jsonl", ["{"] * 5 + numbered(95))
    config = configure("data", {"name": "jsonl", "train_files": str(path), "validation_fraction": 0.0})
    _, report = tokenize_rows(
        build(config, seed=0).train_rows(), ChatRenderer(load_tokenizer()), config, "training"
    )
    assert report.to_dict()["dropped"] == {
        "bad JSON": {"count": 5, "first": [f"{path}:{n}" for n in (1, 2, 3)]}
    }


def test_a_row_whose_template_marks_nothing_has_no_trainable_token(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{%- for message in messages -%}{%- if message.role == 'assistant' and message.content == 'b' -%}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
        "{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}{%- endfor -%}"
    )
    path = write(
        tmp_path / "rows.jsonl",
        [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT | {"content": "b"}]}],
    )
    config = configure("data", {"name": "jsonl", "train_files": str(path), "max_bad_fraction": 0.5})
    renderer = ChatRenderer(load_tokenizer(), str(template))
    rows, report = tokenize_rows(build(config, seed=0).train_rows(), renderer, config, "training")
    assert report.dropped["no trainable token"].first == [f"{path}:1"]
    assert report.trainable_tokens == rows.is_label.sum() == 2


def test_a_rows_first_token_is_never_a_label(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
        "{%- else -%}{{ message.content }}{%- endif -%}{%- endfor -%}"
    )
    path = write(tmp_path / "rows.jsonl", [{"messages": [ASSISTANT | {"content": "ab"}, USER]}])
    config = configure("data", {"name": "jsonl", "train_files": str(path), "validation_fraction": 0.0})
    renderer = ChatRenderer(load_tokenizer(), str(template))
    rows, report = tokenize_rows(build(config, seed=0).train_rows(), renderer, config, "training")
    assert rows.is_label.tolist() == [False, True, True, False, False, False]
    assert rows.label_counts.tolist() == [report.trainable_tokens] == [2]


def test_bad_rows_stop_the_run_on_demand_with_file_line_and_reason(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [*numbered(3), "{", *numbered(90)])
    config = configure("data", {"name": "jsonl", "train_files": str(path), "on_bad_row": "error"})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:4: bad JSON .*data\.on_bad_row=drop"):
        tokenize_rows(build(config, seed=0).train_rows(), ChatRenderer(load_tokenizer()), config, "training")


def test_too_many_bad_rows_stop_the_run_with_their_counts(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", ["{", *numbered(4), "[]"])
    config = configure("data", {"name": "jsonl", "train_files": str(path), "validation_fraction": 0.0})
    with pytest.raises(
        ConfigError, match=r"2 of 6 training rows are bad, .*=0\.1: 1 bad JSON .*; 1 not an object"
    ):
        tokenize_rows(build(config, seed=0).train_rows(), ChatRenderer(load_tokenizer()), config, "training")


def test_the_forms_that_files_come_in_are_brought_to_one(tmp_path: Path):
    message = {"role": "user", "content": [{"type": "text", "text": "2"}, "+2"], "name": None}
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        {"messages": [message, *call('{"a": null}')["messages"][1:]], "tools": json.dumps(tools), "id": None}
    ]
    [row] = good(source(write(tmp_path / "rows.jsonl", rows), validation_fraction=0.0))
    assert row.messages[0] == {"role": "user", "content": "2+2"}
    # a null inside a tool's arguments is a value
    function = {"name": "add", "arguments": {"a": None}}
    assert row.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    assert row.tools == tools


def test_empty_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(numbered(1)[0]).encode()
        + b"\r\n\r\n  \n"
        + json.dumps(numbered(1)[0]).encode()
    )
    assert [row.origin for row in good(source(path, validation_fraction=0.0))] == [f"{path}:1", f"{path}:4"]


def test_a_hash_of_the_row_decides_what_is_held_out(tmp_path: Path):
    rows = numbered(1000)
    path = write(tmp_path / "rows.jsonl", rows + rows[:100])
    split = source(path, validation_fraction=0.2)
    train, held_out = [
        [row.messages[0]["content"] for row in part] for part in (split.train_rows(), split.validation_rows())
    ]
    assert len(train) + len(held_out) == 1100
    assert not set(train) & set(held_out)
    assert 150 <= len(set(held_out)) <= 250
    # another file, order and spelling: the same rows are held out
    again = source(
        write(
            tmp_path / "b.jsonl", [json.dumps(row, indent=None, separators=(",", ":")) for row in rows[::-1]]
        ),
        validation_fraction=0.2,
    )
    assert {row.messages[0]["content"] for row in again.validation_rows()} == set(held_out)


def test_validation_files_are_read_whole_and_the_training_files_too(tmp_path: Path):
    path, held_out = write(tmp_path / "a.jsonl", numbered(50)), write(tmp_path / "b.jsonl", numbered(7))
    split = source(path, validation_files=[str(held_out)], validation_fraction=0.5)
    assert (len(list(split.train_rows())), len(list(split.validation_rows()))) == (50, 7)


def test_bad_rows_are_reported_with_the_training_rows_only(tmp_path: Path):
    split = source(write(tmp_path / "a.jsonl", ["{"] * 100), validation_fraction=0.5)
    assert len(list(split.train_rows())) == 100
    assert not list(split.validation_rows())


def test_patterns_and_lists_name_each_file_once(tmp_path: Path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", [numbered(1)[0]])
    rows = good(source([str(tmp_path / "b.jsonl"), str(tmp_path / "*.jsonl")], validation_fraction=0.0))
    assert [Path(row.origin.rsplit(":", 1)[0]).stem for row in rows] == ["b", "a", "c"]


@pytest.mark.parametrize("files", ["missing.jsonl", ["missing-*.jsonl"], 3, [3], {"a": 1}])
def test_files_that_are_not_there_or_no_paths_are_refused(files: Any):
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        configure("data", {"name": "jsonl", "train_files": files})


def test_training_files_must_be_given():
    config = configure("data", "jsonl")
    with pytest.raises(ConfigError, match=r"data\.train_files is not given"):
        config.check_files()


def test_the_description_says_which_files_and_how_large(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", numbered(20000))
    assert (
        source(path).description
        == f"jsonl: rows.jsonl ({path.stat().st_size / 1e6:.1f} MB), 5.0% of the rows held out"
    )


def test_a_choice_is_checked_without_torch_and_numpy():
    program = (
        "import sys; from afmoe.registry import configure;"
        "configure('data', 'jsonl'); configure('data', 'reverse_text');"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
