"""Find calls in the text of an answer as it streams, one parser per way of writing them down (`formats.py`)."""

from __future__ import annotations

from collections.abc import Collection

from ssd_ascend.serve.parts import CallArguments, CallStart, Part, Text, held_back
from ssd_ascend.serve.tools.scanner import CallScanner

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_SURELY_OPENING = HERMES_OPEN[: len("<tool")]
"""Less of the mark may be prose that ends there."""
_CALL_HEAD = '{"name":'


class _Calls:
    """The calls of one answer: numbers them, and hands their pieces out."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._count = 0
        self._is_open = False

    @property
    def is_full(self) -> bool:
        """Whether another call would be one too many."""
        return self._most is not None and self._count >= self._most

    @property
    def has_any(self) -> bool:
        """Whether there has been a call."""
        return self._count > 0

    def pieces(self, scanner: CallScanner) -> list[Part]:
        """What the scanner has learnt since it was last asked."""
        parts: list[Part] = []
        if scanner.name is None:
            return parts
        if not self._is_open:
            parts.append(CallStart(self._count, scanner.name))
            self._is_open = True
        if piece := scanner.take():
            parts.append(CallArguments(self._count, piece))
        return parts

    def close(self) -> None:
        """The call has ended."""
        self._count += self._is_open
        self._is_open = False


class HermesParser:
    """Prose with `<tool_call> {...} </tool_call>` in it, as Qwen and Hermes models write."""

    def __init__(self, *, most: int | None = None) -> None:
        self._calls = _Calls(most)
        self._state = "prose"
        self._held = ""
        self._scanner = CallScanner()

    def feed(self, text: str) -> list[Part]:
        """See `Stage`."""
        self._held += text
        parts: list[Part] = []
        while True:
            state, length = self._state, len(self._held)
            parts += self._read()
            if (self._state, len(self._held)) == (state, length):
                return parts

    def _read(self) -> list[Part]:
        """As much as the state that we are in can tell of what is held."""
        match self._state:
            case "opening":
                return self._opening()
            case "call":
                return self._call()
            case "closing":
                return self._closing()
            case "between":
                return self._between()
        return self._prose()

    def _prose(self) -> list[Part]:
        if self._calls.is_full:  # nothing is to follow the last call
            self._held = ""
            return []
        before, mark, rest = self._held.partition(HERMES_OPEN)
        if mark:
            self._state, self._held, self._scanner = "opening", rest, CallScanner()
            before = before.rstrip()
        else:
            before = before[: len(before) - held_back(before, HERMES_OPEN)].rstrip()
            self._held = self._held[len(before) :]
        return [Text(before)] if before else []

    def _opening(self) -> list[Part]:
        start = self._held.lstrip()
        if not start:
            return []
        if not start.startswith("{"):
            return self._no_call(self._held)
        self._state, self._held = "call", start
        return []

    def _call(self) -> list[Part]:
        taken = self._scanner.feed(self._held)
        self._held = self._held[taken:]
        if self._scanner.failed:
            return self._no_call(self._scanner.text + self._held)
        parts = self._calls.pieces(self._scanner)
        if self._scanner.is_complete:
            self._calls.close()
            self._state = "closing"
        return parts

    def _closing(self) -> list[Part]:
        start = self._held.lstrip()
        if start.startswith(HERMES_CLOSE):
            self._state, self._held = "between", start.removeprefix(HERMES_CLOSE)
        elif start and not HERMES_CLOSE.startswith(start):
            self._state = "prose"
        return []

    def _between(self) -> list[Part]:
        self._held = self._held.lstrip()
        if self._held:
            self._state = "prose"
        return []

    def _no_call(self, rest: str) -> list[Part]:
        self._state, self._held = "prose", rest
        return [Text(HERMES_OPEN)]

    def finish(self, *, is_cut: bool) -> list[Part]:
        """See `Stage`. A call that was cut off stays a call, with what there is of its arguments; cut off before its
        name was whole, it is dropped, since nobody wants to read its markup."""
        rest, self._held = self._held, ""
        if self._state == "opening" or (self._state == "call" and self._scanner.name is None):
            is_markup = True
            rest = HERMES_OPEN + (self._scanner.text if self._state == "call" else "") + rest
        elif self._state != "prose" or self._calls.is_full:
            return []
        else:
            is_markup = rest.lstrip().startswith(_SURELY_OPENING)
        return [Text(rest)] if rest.strip() and not (is_cut and is_markup) else []


class Llama3Parser:
    """An answer that is calls and nothing else: `{"name": ..., "parameters": {...}}`, several parted by `;`.

    An object that is no call of a known function makes the rest of the answer prose, itself included.
    """

    def __init__(self, names: Collection[str], *, most: int | None = None) -> None:
        self._names = names
        self._calls = _Calls(most)
        self._state = "between"
        self._held = ""
        self._scanner = CallScanner()

    def feed(self, text: str) -> list[Part]:
        """See `Stage`."""
        if self._state == "prose":
            return [Text(text)]
        self._held += text
        parts: list[Part] = []
        while self._held and self._state != "prose":
            if self._state == "between" and not self._begin():
                break
            if self._state == "call":
                parts += self._read_call()
        if self._state == "prose" and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def _begin(self) -> bool:
        """Look for the next call; False while more text must come first."""
        start = self._held.lstrip().removeprefix(PYTHON_TAG).lstrip("; \n\t")
        if self._calls.is_full:
            self._held = ""
            return False
        if start.startswith("{"):
            self._state, self._held, self._scanner = "call", start, CallScanner()
            return True
        if not start or PYTHON_TAG.startswith(start):
            return False
        self._state = "prose"
        return True

    def _read_call(self) -> list[Part]:
        taken = self._scanner.feed(self._held)
        self._held = self._held[taken:]
        name = self._scanner.name
        if self._scanner.failed or (name is not None and name not in self._names):
            self._state, self._held = "prose", self._scanner.text + self._held
            return []
        parts = self._calls.pieces(self._scanner)
        if self._scanner.is_complete:
            self._calls.close()
            self._state = "between"
        return parts

    def finish(self, *, is_cut: bool) -> list[Part]:
        """See `Stage`. A call that was cut off before its name was whole is dropped."""
        rest, self._held = self._held, ""
        if self._state == "call" and self._scanner.name is None:
            rest = self._scanner.text + rest
        is_markup = self._state == "call" and (self._calls.has_any or _begins_a_call(rest))
        is_shown = self._state != "prose" and not (is_cut and is_markup)
        return [Text(rest)] if is_shown and rest.strip("; \n\t") else []


def _begins_a_call(text: str) -> bool:
    """Whether this beginning of an object is one of a call rather than of JSON that is the answer."""
    bare = "".join(text.split())
    return bare.startswith(_CALL_HEAD) or (len(bare) > len('{"') and _CALL_HEAD.startswith(bare))
