"""Text as its tokens arrive: a character that several tokens spell is held back until it is whole."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

# a character of UTF-8 has at most four bytes, so at most three of it can be waiting for the rest
_MOST_WAITING = 3
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# tokens decoded together; after that many, those before the last few are given up as context
_LONGEST = 64
_CONTEXT = 16


class TextStream:
    """Takes token ids one by one and gives back the text that they have made certain.

    What comes out adds up to the tokenizer's decoding of all ids; special tokens are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often none."""
        self._ids.append(token_id)
        text = self._decoded()
        new = self._give(text, _length_of_certain(text))
        if len(self._ids) > _LONGEST and self._num_given == len(text):
            # the context starts anywhere, even in a character; the same beginning is cut off every time
            self._ids = self._ids[-_CONTEXT:]
            self._num_given = len(self._decoded())
        return new

    def finish(self) -> str:
        """What was held back: the marks of bytes that never became a character."""
        text = self._decoded()
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        new = text[self._num_given : end]
        self._num_given = max(end, self._num_given)
        return new

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


def _length_of_certain(text: str) -> int:
    """Characters before the marks at the end that may yet become one."""
    waiting = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(waiting, _MOST_WAITING)
