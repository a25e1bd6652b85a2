"""Reads one call, a JSON object of a name and arguments, as its characters come. The parsers of this room use it."""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_LIMIT = 1024
"""A head that is longer is not looked for any more: the call is then read when it is whole."""


class CallScanner:
    """`name` is known as soon as the text says it first; arguments come out of `take` piece by piece from then on.

    A call that is written in another order is understood at its end. What is no call at all has `failed` set.
    """

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.is_complete = False
        self.failed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._taken = 0
        self._arguments_end: int | None = None

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belonged to the object (fewer than given once it is complete)."""
        before = len(self.text)
        for at, character in enumerate(text):
            self._step(character)
            if self._depth == 0 and character == "}" and not self._in_string:
                self.is_complete, text = True, text[: at + 1]
                break
            if self._depth == 1 and character in "}]" and self.name is not None and self._arguments_end is None:
                self._arguments_end = before + at + 1
        self.text += text
        if self.name is None and before < _HEAD_LIMIT:
            self._read_head()
        if self.is_complete and self.name is None:
            self._read_whole()
        return len(text)

    def _step(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _read_head(self) -> None:
        match = _HEAD.match(self.text)
        if match is None:
            return
        try:
            self.name = json.loads(match[1])
        except ValueError:
            return  # a name with broken escapes: no name
        self._taken = match.end()
        self._arguments_end = _end_of_value(self.text, self._taken)

    def _read_whole(self) -> None:
        try:
            call = json.loads(self.text)
        except ValueError:
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str):
            self.failed = True
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        self.name = name
        self.text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._taken, self._arguments_end = 0, len(self.text)

    def take(self) -> str:
        """The text of the arguments that was not handed out yet."""
        if self.name is None:
            return ""
        end = len(self.text) if self._arguments_end is None else self._arguments_end
        piece = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece


def _end_of_value(text: str, start: int) -> int | None:
    """Where the object that begins at `start` ends, if it does."""
    scanner = CallScanner()
    scanner.name = ""  # only its braces matter
    taken = scanner.feed(text[start:])
    return start + taken if scanner.is_complete else None
