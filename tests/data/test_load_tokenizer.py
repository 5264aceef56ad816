"""The embedded byte tokenizer, its template, and tokenizers from elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afmoe.data.chat import ChatRenderer
from afmoe.data.tokenizer import load_tokenizer
from afmoe.errors import ConfigError

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "afmoe" / "data" / "assets"


def test_every_text_survives_the_round_trip_through_bytes():
    tokenizer = load_tokenizer()
    text = "".join(map(chr, [*range(0x2000), *range(0x3040, 0x3100), 0x1F642])) + "  a , b . 's n't\r\n\t "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_each_control_token_is_one_id_after_the_bytes():
    tokenizer = load_tokenizer()
    names = "<|pad|> <|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|>"
    names += " <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
    assert [tokenizer.encode(name, add_special_tokens=False) for name in names.split()] == [
        [index] for index in range(256, 267)
    ]
    assert len(tokenizer) == 267
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|im_end|>")


def test_what_an_assistant_writes_itself_is_not_hidden_as_special():
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("<think>x</think>y<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>y"


def test_the_committed_tokenizer_is_the_one_that_the_script_writes(tmp_path: Path):
    script = ROOT / "scripts" / "make_reverse_text_assets.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "byte_tokenizer" / name).read_bytes() == (
            ASSETS / "byte_tokenizer" / name
        ).read_bytes()
    version = (ASSETS / "NOTICE").read_text().split("Python ", 1)[1].split(",")[0]
    if version.split(".")[:2] == [str(number) for number in sys.version_info[:2]]:
        assert (tmp_path / "pydoc_topics.txt").read_text() == (ASSETS / "pydoc_topics.txt").read_text()


def test_the_notice_holds_what_the_python_licence_asks_for():
    notice = (ASSETS / "NOTICE").read_text()
    for part in (
        "Summary of changes",
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
        "All Rights Reserved",
        "8. By",
    ):
        assert part in notice


def test_a_saved_copy_loads_with_the_same_ids_and_template(tmp_path: Path):
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    copy = load_tokenizer(str(tmp_path))
    assert copy.get_vocab() == tokenizer.get_vocab()
    assert copy.chat_template == tokenizer.chat_template


def test_neither_loading_nor_rendering_opens_a_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    load_tokenizer().save_pretrained(tmp_path)
    for path in (None, str(tmp_path)):
        assert ChatRenderer(load_tokenizer(path)).end_of_turn_id == 260


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))


def test_a_hub_name_that_is_not_at_hand_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="no tokenizer at nobody/nothing") as error:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_a_stop_token_is_refused(tmp_path: Path):
    load_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["eos_token"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="names no stop token"):
        load_tokenizer(str(tmp_path))
