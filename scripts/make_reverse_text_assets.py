"""Write the assets that `data=reverse_text` ships with: English prose, its licence notice, a byte tokenizer.

    python scripts/make_reverse_text_assets.py [--output afmoe/data/assets]

The prose is that of `pydoc_data.topics`, so the result depends on the Python it runs on; the committed files
are what counts, and `NOTICE` says which Python they come from. `chat_template.jinja` is written by hand and
left alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ASSETS_DIRECTORY = Path(__file__).parent.parent / "afmoe" / "data" / "assets"

PAD, END_OF_TURN = "<|pad|>", "<|im_end|>"
CONTROL_TOKENS = (PAD, "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", END_OF_TURN)
# markup that an assistant writes itself: `skip_special_tokens` must not hide it
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TYPOGRAPHY = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2026": "..."}
)
UNDERLINE = re.compile(r"\s*([*=\-^~])\1{2,}\s*")
CODE = re.compile(r"::=|>>>|\.\.\. | = |[{}\\|]|==|\bdef |\bimport ")
MIN_PARAGRAPH_LENGTH = 60

SUMMARY = """\
pydoc_topics.txt holds text of the documentation of Python {version}, from its module pydoc_data.topics.

Summary of changes: headings, code, grammar, tables and repeated paragraphs were left out, each paragraph was
joined to one line, and typographic quotes, dashes and ellipses were replaced by ASCII. The text is used
under the licence below, which is reproduced as it asks.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ASSETS_DIRECTORY)
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    (output / "pydoc_topics.txt").write_text(topics_text(), encoding="utf-8")
    (output / "NOTICE").write_text(notice(), encoding="utf-8")
    write_tokenizer(output / "byte_tokenizer")


def topics_text() -> str:
    """Every topic as a line `# name` and one line a paragraph; a repeated paragraph stands once."""
    lines: list[str] = []
    seen: set[str] = set()
    for name in sorted(topics):
        paragraphs = [text for text in prose(topics[name]) if text not in seen]
        if paragraphs:
            lines += [f"# {name}", *dict.fromkeys(paragraphs)]
            seen.update(paragraphs)
    return "\n".join(lines) + "\n"


def prose(text: str) -> list[str]:
    """The paragraphs of a topic that are sentences: no headings, code, grammar, lists or tables; ASCII."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text.translate(TYPOGRAPHY)):
        lines = block.strip("\n").split("\n")
        if len(lines) > 1 and UNDERLINE.fullmatch(lines[1]):
            continue
        paragraph = " ".join(block.split())
        is_sentence = re.match(r'["A-Z]', paragraph) and re.search(r"[.:!?)]$", paragraph)
        if (
            is_sentence
            and paragraph.isascii()
            and len(paragraph) >= MIN_PARAGRAPH_LENGTH
            and not CODE.search(paragraph)
        ):
            paragraphs.append(paragraph)
    return paragraphs


def notice() -> str:
    """What the Python licence asks of a derived work: its text, the copyright, a summary of the changes."""
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt").read_text(encoding="utf-8")
    title = "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n"
    start = licence.index(title + "-")
    end = licence.index("BEOPEN.COM LICENSE AGREEMENT", start)
    return f"{SUMMARY.format(version=platform.python_version())}\n\n{licence[start:end].rstrip()}\n"


def byte_alphabet() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, in the order of the bytes.

    Printable Latin-1 bytes stand for themselves, the others for the code points from 256 on (GPT-2's
    `encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of 256 bytes (id = byte) and the special tokens, in Hugging Face's files."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=True)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
