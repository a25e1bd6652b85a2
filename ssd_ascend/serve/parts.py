"""What the text of a chat answer is made of, and the pipeline that takes it apart as it streams, for `serve/chat.py`.

Text goes in, in pieces of any size; thoughts, prose and tool calls come out, as soon as nothing that follows can change
what they are. However the text was cut, the parts put together are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    """A piece of prose."""

    text: str


class Reasoning(NamedTuple):
    """A piece of what the model thought before it answered."""

    text: str


class CallStart(NamedTuple):
    """Call `number` of the answer begins."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of a call, as JSON text."""

    number: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments


class Stage(Protocol):
    """Takes text apart. `finish` gives what was held back, once no text follows; `is_cut`: because it is cut off there,
    so that a mark which has begun was to be one."""

    def feed(self, text: str) -> list[Part]: ...
    def finish(self, *, is_cut: bool) -> list[Part]: ...


class Pipeline:
    """Stages one behind the other: each looks at the prose that the one before it leaves."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def feed(self, text: str, *, ends: str | None) -> list[Part]:
        """The parts that `text` completes. ends: the reason why nothing follows, if nothing does."""
        parts: list[Part] = [Text(text)] if text else []
        for stage in self._stages:
            parts = list(_through(stage, parts))
            if ends is not None:
                parts += stage.finish(is_cut=ends == "length")
        return parts


def _through(stage: Stage, parts: Iterable[Part]) -> Iterable[Part]:
    for part in parts:
        if isinstance(part, Text):
            yield from stage.feed(part.text)
        else:
            yield part


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
