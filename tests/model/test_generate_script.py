"""scripts/generate.py: a prompt, a file, a chat through a pipe; text that never breaks inside a character."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity import SMALL, randomize

from afmoe import AfmoeConfig, AfmoeForCausalLM
from afmoe.data.text_stream import TextStream
from afmoe.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"
MARK = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights and the embedded byte tokenizer: it writes any bytes at all."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer()
    fields = SMALL | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = AfmoeForCausalLM(AfmoeConfig(**fields))
    randomize(model, seed=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def generate(directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Call the script in this process."""

    def run(*arguments: object, path: object = directory) -> Ran:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["generate.py", str(path), *map(str, arguments)])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Ran(code, *capfd.readouterr())

    return run


def expected_text(directory: Path, ids: list[int], num_tokens: int) -> str:
    tokenizer = load_tokenizer(str(directory))
    model = AfmoeForCausalLM.from_pretrained(directory)
    new_ids = model.generate(torch.tensor([ids]), num_tokens)[0, len(ids) :]
    return tokenizer.decode(new_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "é",
        "日本語のテキスト",
        "👩‍👩‍👧 family 🇫🇷",
        "a\u0301 x",
        "".join(map(chr, range(0x20, 0x3000, 7))) * 2,
    ],
)
def test_a_stream_gives_whole_characters_as_soon_as_they_are(text: str):
    stream, pieces = TextStream(load_tokenizer()), []
    for byte in text.encode():
        pieces.append(stream.push(byte))
        assert MARK not in pieces[-1]
        # no more than an unfinished character is held back
        assert len(text.encode()[: len(pieces)]) - len("".join(pieces).encode()) <= 3
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_stream_of_any_bytes_adds_up_to_the_decoding_of_all():
    tokenizer, draw = load_tokenizer(), random.Random(0)
    for _ in range(20):
        # any bytes, characters of several bytes, special tokens
        ids = [draw.choice([draw.randrange(256), 0xE2, 0x82, 0xAC, 0xF0, 256]) for _ in range(200)]
        stream = TextStream(tokenizer)
        text = "".join(map(stream.push, ids)) + stream.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "options", [[], ["--cache", "static"], ["--attention", "reference", "--compute", "bf16"]]
)
def test_a_prompt_is_continued_as_the_model_does(generate, directory: Path, options: list[str]):
    ran = generate("--prompt", "Once", "--max-new-tokens", 20, "--accelerator", "cpu", *options)
    assert ran.code == 0, ran.err
    assert "experts" in ran.err
    assert "20 tokens in" in ran.err
    if "--compute" not in options:
        assert ran.out == expected_text(directory, list(b"Once"), 20) + "\n"


def test_a_file_is_answered_line_by_line_in_batches(generate, directory: Path, tmp_path: Path):
    prompts = ["Once upon", "é", "a much longer line than the others", "x"]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts), encoding="utf-8")
    ran = generate("--file", tmp_path / "prompts.txt", "--max-new-tokens", 12, "--batch-size", 3)
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    for answer in answers:
        assert answer["answer"] == expected_text(directory, list(answer["prompt"].encode()), 12)


def test_a_chat_through_a_pipe_remembers_what_was_said(
    generate, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    said = "hello\nand then?\n/new\nhello\n"
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
        pipe.write(said)
    with os.fdopen(read_end, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        ran = generate("--chat", "--max-new-tokens", 8, "--system", "Be brief.")
    assert ran.code == 0, ran.err
    tokenizer = load_tokenizer(str(directory))
    system = {"role": "system", "content": "Be brief."}
    messages, expected = [system], []
    for line in said.splitlines():
        if line == "/new":
            messages = [system]
            continue
        messages.append({"role": "user", "content": line})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        expected.append(expected_text(directory, ids, 8))
        messages.append({"role": "assistant", "content": expected[-1]})
    assert ran.out == "".join(f"{answer}\n" for answer in expected)
    assert expected[0] == expected[2] != expected[1]


def test_a_template_makes_a_prompt_the_users_turn(generate, directory: Path):
    ran = generate("--prompt", "hello", "--template", "--max-new-tokens", 8)
    messages = [{"role": "user", "content": "hello"}]
    ids = load_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ran.out == expected_text(directory, ids, 8) + "\n"


def test_a_seed_repeats_what_is_drawn(generate):
    options = ["--prompt", "x", "--max-new-tokens", 16, "--temperature", 1.5, "--top-k", 50, "--top-p", 0.95]
    first, again, other = (generate(*options, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_nothing_is_written_behind_a_stop_token(generate, directory: Path, tmp_path: Path):
    # a byte that greedy generation writes as its fourth becomes a stop token of the generation config
    ids = (
        AfmoeForCausalLM.from_pretrained(directory)
        .generate(torch.tensor([list(b"Once")]), 12)[0, 4:]
        .tolist()
    )
    place = next(place for place in range(2, 12) if ids[place] not in ids[:place])
    copied = tmp_path / "model"
    copied.mkdir()
    for file in directory.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[place], 256]}))
    ran = generate("--prompt", "Once", "--max-new-tokens", 12, path=copied)
    assert ran.out == load_tokenizer().decode(ids[:place], skip_special_tokens=True) + "\n"
    (tmp_path / "prompts.txt").write_text("Once")
    ran = generate("--file", tmp_path / "prompts.txt", "--max-new-tokens", 12, path=copied)
    assert json.loads(ran.out)["answer"] == load_tokenizer().decode(ids[:place], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --prompt --file --chat is required"),
        (["--prompt", "x", "--chat"], "not allowed with"),
        (["--prompt", "x", "--top-p", "2"], "top_p must lie in (0, 1], got 2.0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be at least 0"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", "x", "--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["--prompt", "x", "--attention", "sdpaa"], "invalid choice: 'sdpaa'"),
        (
            ["--prompt", "x", "--attention", "flash", "--accelerator", "cpu"],
            "attention=flash needs a CUDA GPU",
        ),
        (["--prompt", "x", "--compile"], "compile=True needs cache=static"),
        (["--prompt", "x", "--system", "y"], "--system needs --chat or --template"),
        (["--file", "missing.txt"], "--file missing.txt cannot be read"),
        (["--chat", "--tokenizer", "missing"], "no tokenizer at missing"),
    ],
)
def test_a_mistake_is_one_line(generate, arguments: list[str], message: str):
    ran = generate(*arguments)
    assert ran.code == 1
    assert message in ran.err
    assert [line.startswith("error: ") for line in ran.err.strip().splitlines()][-1]
    assert ran.out == ""


def test_a_directory_that_is_none_is_one_line(generate, tmp_path: Path):
    ran = generate("--prompt", "x", path=tmp_path / "none")
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert "no such directory" in ran.err


def test_help_loads_no_torch():
    code = f"""
import runpy, sys
sys.argv = ["generate.py", "--help"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit:
    pass
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "--top-p" in ran.stdout
