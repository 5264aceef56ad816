"""A conversation as token ids, with a mask of what the assistant wrote, by the tokenizer's own chat template.

The template marks the assistant's part with `{% generation %}`. Without the marks nothing could be trained,
and transformers would hand back a mask of zeros, so such a template is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from afmoe.data.rows import BadRow, Row, RowError
from afmoe.errors import ConfigError

log = logging.getLogger(__name__)

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = (
    "give data.chat_template=FILE, a copy of the template with {% generation %} before what the assistant "
    "writes and {% endgeneration %} after it, its end-of-turn token included"
)
SELF_TEST = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclass(frozen=True, slots=True)
class Rendered:
    input_ids: list[int]
    assistant_mask: list[int]
    """1 where the assistant wrote the token."""


class ChatRenderer:
    """Renders rows with `tokenizer`, whose template a `template_path` replaces, also for later exports.

    Raises `ConfigError` when the template is missing, has no generation marks, or leaves the end-of-turn
    token out of them: a model trained so would never stop.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_path: str | None = None) -> None:
        self.tokenizer = tokenizer
        if template_path is not None:
            try:
                tokenizer.chat_template = Path(template_path).expanduser().read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"data.chat_template={template_path} is no text file: {error}") from error
        if not isinstance(tokenizer.chat_template, str):
            raise ConfigError("the tokenizer has no chat template; give data.chat_template=FILE")
        if not GENERATION_MARK.search(tokenizer.chat_template):
            raise ConfigError(f"the chat template has no {{% generation %}} marks; {REMEDY}")
        # Any: the declared types are those of all that it can return
        self._apply_template: Any = tokenizer.apply_chat_template
        self._special_text, self._control_text = self._control_patterns()
        self.end_of_turn_id = self._trained_end_of_turn()
        if self.end_of_turn_id != tokenizer.eos_token_id:
            log.warning(
                "the chat template ends a turn with %r, the tokenizer's stop token is %r: stop at both",
                tokenizer.convert_ids_to_tokens(self.end_of_turn_id),
                tokenizer.eos_token,
            )

    def render(self, rows: Sequence[Row]) -> list[Rendered | BadRow]:
        """Each row as ids and mask, or what is wrong with it. Neighbours with equal tools share a call."""
        results: list[Rendered | BadRow] = []
        group: list[Row] = []
        for row in rows:
            try:
                self._check_control_text(row)
            except RowError as error:
                results += self._render_group(group)
                group = []
                results.append(BadRow(error.reason, row.origin, error.detail))
                continue
            if group and row.tools != group[-1].tools:
                results += self._render_group(group)
                group = []
            group.append(row)
        return results + self._render_group(group)

    def render_prompt(self, row: Row) -> list[int]:
        """Ids up to where the assistant's last turn begins to be written."""
        prompt = row.messages[: last_assistant_turn(row)]
        batch = self._apply_template(prompt, tools=row.tools, add_generation_prompt=True, return_dict=True)
        return batch["input_ids"]

    def _render_group(self, rows: list[Row]) -> list[Rendered | BadRow]:
        if not rows:
            return []
        try:
            batch = self._apply_template(
                [row.messages for row in rows],
                tools=rows[0].tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        # a template refuses a conversation by TemplateError; the others come of filters on unexpected values
        except (TemplateError, TypeError, ValueError) as error:
            if len(rows) == 1:
                return [BadRow("refused by the chat template", rows[0].origin, str(error))]
            return [result for row in rows for result in self._render_group([row])]
        return [Rendered(*pair) for pair in zip(batch["input_ids"], batch["assistant_masks"], strict=True)]

    def _control_patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """What matches special tokens, and what matches those or the template's other markup."""
        added = [token for token in self.tokenizer.added_tokens_decoder.values() if token.content.strip()]
        special = [token.content for token in added if token.special]
        markup = [token.content for token in added if token.content in self.tokenizer.chat_template]
        return _any_of(special), _any_of([*special, *markup])

    def _check_control_text(self, row: Row) -> None:
        """Raise `RowError` where text would become a control token and so end or open a turn.

        An assistant may write its own markup (`<think>`, `<tool_call>`), nobody else.
        """
        for message in row.messages:
            pattern = self._special_text if message["role"] == "assistant" else self._control_text
            texts = [text for key, text in message.items() if key != "role" and isinstance(text, str)]
            if "tool_calls" in message:
                texts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
            for text in texts:
                if found := pattern.search(text):
                    raise RowError("control token in content", f"{found.group()!r} from {message['role']}")
        if row.tools and (found := self._control_text.search(json.dumps(row.tools, ensure_ascii=False))):
            raise RowError("control token in content", f"{found.group()!r} in tools")

    def _trained_end_of_turn(self) -> int:
        result = self._render_group([Row(SELF_TEST, None, "self-test")])[0]
        if isinstance(result, BadRow):
            raise ConfigError(
                f"the chat template cannot render a user's and an assistant's turn: {result.detail}"
            )
        written = [token for token, mine in zip(result.input_ids, result.assistant_mask, strict=True) if mine]
        if not written:
            raise ConfigError(f"the chat template's {{% generation %}} marks hold nothing; {REMEDY}")
        if written[-1] not in self.tokenizer.added_tokens_decoder:
            text = self.tokenizer.decode(written[-1:])
            raise ConfigError(
                f"the chat template's {{% generation %}} marks end with {text!r}, no end-of-turn token, so "
                f"the model would never learn to stop; {REMEDY}"
            )
        return written[-1]


def last_assistant_turn(row: Row) -> int:
    return max(index for index, message in enumerate(row.messages) if message["role"] == "assistant")


def _any_of(texts: list[str]) -> re.Pattern[str]:
    # "(?!)" matches nothing: a tokenizer without control tokens has nothing to inject
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
