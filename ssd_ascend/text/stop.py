"""Finds stop strings in text that arrives in pieces; `TextStream` asks it once per token.

An Aho-Corasick automaton reads each character once, so the answer depends on the text alone: not on where tokens begin,
not on how many come in one step, not on where in a run the stop string lies. Its depth is what a stream must hold back.
Aho, Corasick: Efficient string matching, CACM 18(6), 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ssd_ascend.errors import RequestError


class StopMatcher:
    """The automaton of a set of stop strings: immutable, built once per request and shared by its `n` answers."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty", param="stop", remedy="leave it out")
        self._next: list[dict[str, int]] = [{}]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        self.held: list[int] = [0]  # length of the longest suffix that could still grow into a stop string
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character; amortised constant time."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.match.append(None)
                self.held.append(depth)
            state = self._next[state][character]
        self.match[state] = stop

    def _link(self) -> None:
        """Fill in, breadth first, where each state falls back to (one character: the root), and what it inherits."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            back = self._fail[state]
            self.match[state] = self.match[state] or self.match[back]
            if not self._next[state]:
                self.held[state] = self.held[back]  # complete: nothing longer can come of it
            for character, child in self._next[state].items():
                self._fail[child] = self.step(back, character)
                queue.append(child)


class StopChecker:
    """Feeds one answer's text through a matcher and releases what can no longer be part of a stop string.

    The stop string that is complete first wins; of several that end at the same character, the longest.
    """

    def __init__(self, matcher: StopMatcher, *, include_stop_str: bool = False) -> None:
        self._matcher = matcher
        self._include_stop_str = include_stop_str
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matched

    def feed(self, piece: str, *, armed: bool = True) -> str:
        """The text that may be shown now that `piece` has come; a stop string completed while not `armed` is text."""
        assert self._matched is None, "fed after the stop"
        text = self._held + piece
        state, match, step = self._state, self._matcher.match, self._matcher.step
        for index, character in enumerate(piece, start=len(self._held) + 1):
            state = step(state, character)
            stop = match[state]
            if armed and stop is not None:
                self._matched, self._held = stop, ""
                return text[:index] if self._include_stop_str else text[: index - len(stop)]
        self._state = state
        cut = len(text) - self._matcher.held[state]
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, when the answer ends otherwise."""
        held, self._held, self._state = self._held, "", 0
        return held
