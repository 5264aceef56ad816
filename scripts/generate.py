"""Let an AFMoE checkpoint write: behind one prompt, behind each line of a file, or in a chat in the terminal.

    python scripts/generate.py DIRECTORY --prompt "Once upon a time" --max-new-tokens 100
    python scripts/generate.py DIRECTORY --file prompts.txt --template > answers.jsonl
    python scripts/generate.py DIRECTORY --chat --temperature 0.7 --top-p 0.9

DIRECTORY holds `config.json`, safetensors in any known layout and a tokenizer; a hub name is fetched. What is
written behind a prompt or in a chat appears as it comes, a file's answers as one JSON object a line; remarks
go to standard error. An empty line or the end of input ends a chat, /new forgets what was said, Ctrl-C stops
an answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afmoe.errors import ConfigError, ScriptParser, script_errors
from afmoe.plugins import known_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from afmoe.model import AfmoeForCausalLM

DTYPES = ("float32", "bfloat16", "float16")
ACCELERATORS = ("auto", "cpu", "gpu")


def main() -> None:
    options = read_options()
    prompts = read_prompts(options.file) if options.file else []
    writer = Writer(options)
    # a terminal that cannot show a character shows a mark for it
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    if options.chat:
        chat(writer, options.system)
    elif options.file:
        for answer in writer.answers(prompts, options.batch_size):
            print(json.dumps(answer, ensure_ascii=False), flush=True)
    else:
        writer.stream(writer.prompt_ids(options.prompt))


def read_options() -> argparse.Namespace:
    text = (__doc__ or "").split("\n\n")
    parser = ScriptParser(description=text[0], epilog=text[2])
    parser.add_argument("directory", metavar="DIRECTORY")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--file", type=Path, metavar="FILE", help="one prompt a line")
    what.add_argument("--chat", action="store_true", help="with the tokenizer's chat template")
    parser.add_argument(
        "--template", action="store_true", help="prompts are a user's turn in the chat template"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the system's turn before a templated prompt or a chat"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, help="of what is drawn; absent: another each time")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts of a file at a time")
    parser.add_argument("--tokenizer", metavar="PATH", help="where DIRECTORY has none")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights in memory")
    parser.add_argument("--attention", choices=sorted(known_names("attention")), default="sdpa")
    parser.add_argument("--compute", choices=sorted(known_names("moe/compute")), default="native")
    parser.add_argument("--cache", choices=("growing", "static"), default="growing")
    parser.add_argument(
        "--compile", action="store_true", help="compile the step of one token (--cache static)"
    )
    options = parser.parse_args()
    if options.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.system is not None and not (options.chat or options.template):
        raise ConfigError("--system needs --chat or --template: only a chat template has a system's turn")
    return options


def read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {path} cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--file {path} holds no prompt: every line is empty")
    return prompts


class Writer:
    """A model, its tokenizer, and how they are asked to write."""

    def __init__(self, options: argparse.Namespace) -> None:
        from afmoe.generation import Caching, Sampling

        self.sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
        self.caching = Caching(kind=options.cache, compile=options.compile)
        if options.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
        self.max_new_tokens = options.max_new_tokens
        self.is_templated = options.template
        self.system = options.system
        self.model, self.tokenizer = load(options)
        self.stop_ids = stop_ids(self.model, self.tokenizer, options.directory)
        self.seed(options.seed)

    def seed(self, seed: int | None) -> None:
        import torch

        torch.seed() if seed is None else torch.manual_seed(seed)

    def prompt_ids(self, prompt: str) -> list[int]:
        if self.is_templated:
            return self.template_ids([*system_turn(self.system), {"role": "user", "content": prompt}])
        # Any: the declared types are those of all that it can take and return
        tokenizer: Any = self.tokenizer
        ids = list(tokenizer(prompt)["input_ids"])
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        if not ids:
            raise ConfigError("an empty prompt has no token to begin with; give a text")
        return ids

    def template_ids(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; use --prompt without --template")
        apply_template: Any = self.tokenizer.apply_chat_template
        try:
            return apply_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"the chat template refuses this: {error}") from error

    def stream(self, ids: list[int]) -> str:
        """Write behind `ids` to standard output as it comes; returns what was written. Ctrl-C ends it."""
        from afmoe.data.text_stream import TextStream

        stream, text, num_tokens, start = TextStream(self.tokenizer), "", 0, time.monotonic()
        with suppress(KeyboardInterrupt):
            for new_ids in self._steps([ids]):
                num_tokens += 1
                token = int(new_ids[0])
                text += "" if token in self.stop_ids else show(stream.push(token))
        text += show(stream.finish())
        print(flush=True)
        seconds = time.monotonic() - start
        remark(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / max(seconds, 1e-9):.1f} a second")
        return text

    def answers(self, prompts: list[str], batch_size: int) -> Iterator[dict[str, str]]:
        """Each prompt with what the model writes behind it, in the order of the prompts."""
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            steps = [new_ids.tolist() for new_ids in self._steps([self.prompt_ids(text) for text in batch])]
            for prompt, row in zip(batch, zip(*steps, strict=True), strict=True):
                answer = self.tokenizer.decode(self._until_stop(row), skip_special_tokens=True)
                yield {"prompt": prompt, "answer": str(answer)}

    def _until_stop(self, row: tuple[int, ...]) -> list[int]:
        end = next((place for place, token in enumerate(row) if token in self.stop_ids), len(row))
        return list(row[:end])

    def _steps(self, prompts: list[list[int]]) -> Iterator[Any]:
        import torch

        from afmoe.generation import generate_tokens

        device = self.model.lm_head.weight.device
        width = max(map(len, prompts))
        ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return generate_tokens(
            self.model,
            torch.tensor(ids, device=device),
            self.max_new_tokens,
            attention_mask=torch.tensor(mask, device=device),
            sampling=self.sampling,
            caching=self.caching,
            eos_token_id=sorted(self.stop_ids),
            pad_token_id=min(self.stop_ids, default=0),
        )


def load(options: argparse.Namespace) -> tuple[AfmoeForCausalLM, PreTrainedTokenizerBase]:
    import torch

    from afmoe.checkpoint.hub import resolve_pretrained
    from afmoe.checkpoint.pretrained import load_pretrained
    from afmoe.data.tokenizer import load_tokenizer
    from afmoe.hardware import detect_hardware

    hardware = detect_hardware(options.accelerator)
    directory = resolve_pretrained(options.directory)
    options.directory = directory
    tokenizer = load_tokenizer(options.tokenizer or str(directory))
    model = load_pretrained(
        directory,
        dtype=getattr(torch, options.dtype),
        attention=options.attention,
        compute=options.compute,
        hardware=hardware,
    )
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is "
            f"{model.config.vocab_size}; give the model's own tokenizer with --tokenizer"
        )
    model.to(hardware.device_type)
    remark(
        f"{model.num_parameters() / 1e6:,.1f} million parameters, {options.dtype} on {hardware.device_type}, "
        f"attention {options.attention}, experts {options.compute}"
    )
    return model.eval(), tokenizer


def stop_ids(model: AfmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> set[int]:
    """Every token that ends a text, by the model's config, its generation config or the tokenizer."""
    from afmoe.checkpoint.config_file import read_json
    from afmoe.checkpoint.model_directory import GENERATION_CONFIG

    named = [model.config.eos_token_id, tokenizer.eos_token_id]
    if (directory / GENERATION_CONFIG).is_file():
        named.append(read_json(directory / GENERATION_CONFIG).get("eos_token_id"))
    lists = [value if isinstance(value, list) else [value] for value in named if value is not None]
    return {token for values in lists for token in values}


def chat(writer: Writer, system: str | None) -> None:
    messages = system_turn(system)
    # a template that is missing or refuses a system's turn is known before anything is typed
    writer.template_ids([*messages, {"role": "user", "content": "?"}])
    while text := next_line():
        if text == "/new":
            messages = system_turn(system)
            continue
        messages.append({"role": "user", "content": text})
        answer = writer.stream(writer.template_ids(messages))
        messages.append({"role": "assistant", "content": answer})


def next_line() -> str:
    """What the person says; empty at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""


def system_turn(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def show(text: str) -> str:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
    return text


def remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with script_errors():
        main()
