"""Turns tokens into text as they come, any number at a time; `TextStream` drives one per running request.

Text is released when it is stable: no later token can change it. Only an unfinished multi-byte character is ever held.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer asks of a tokenizer."""

    @property
    def strip_spaces(self) -> int:
        """Leading spaces that decoding takes off the start of a text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides the token."""
        ...


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """`"".join(feed(run) for run in runs) + flush() == tokenizer.decode(all ids)`, however the ids are cut into runs.

    With `continuation` the text goes on from a prompt, so the leading space that decoding would drop is kept.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True, continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _Utf8Decoder("replace")
        self._spaces_to_strip = 0 if continuation else tokenizer.strip_spaces
        self._length = 0
        self._offsets: list[int] = []

    @property
    def offsets(self) -> list[int]:
        """For each token fed so far, how many characters were stable before it: where its own text starts."""
        return self._offsets

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that a run of tokens made stable."""
        return "".join([self.feed_one(token_id) for token_id in token_ids])

    def feed_one(self, token_id: int) -> str:
        """The text that one token made stable; a character cut over several tokens belongs to the last of them."""
        self._offsets.append(self._length)
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._released(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def hide_one(self) -> None:
        """Count a token that shall have no text, such as the stop token that ended the answer."""
        self._offsets.append(self._length)

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for a character that was never finished, else nothing."""
        return self._released(self._utf8.decode(b"", final=True))

    def _released(self, text: str) -> str:
        if self._spaces_to_strip and text:
            kept = text.lstrip(" ")
            dropped = min(len(text) - len(kept), self._spaces_to_strip)
            self._spaces_to_strip = 0 if dropped < len(text) else self._spaces_to_strip - dropped
            text = text[dropped:]
        self._length += len(text)
        return text
