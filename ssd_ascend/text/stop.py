"""Finds stop strings in text that arrives in pieces; `TextStream` asks it once per token.

An Aho-Corasick automaton reads each character once, so the answer depends on the text alone: not on where tokens begin,
not on how many come in one step, not on where in a run the stop string lies. Its depth is what a stream must hold back.
Aho, Corasick: Efficient string matching, CACM 18(6), 1975.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from ssd_ascend.errors import RequestError


class StopMatcher:
    """The automaton of a set of stop strings: immutable, and shared by all answers that end at the same ones.

    A state stands for a beginning of a stop string, 0 for the empty one. All that is known of it are a few numbers in
    flat arrays: an object for each character would make a hundred times as much of long stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty", param="stop", remedy="leave it out")
        self.stops = ("", *stops)
        self.match = array("I", [0])
        """By state: the longest stop string that ends in it, as its place in `stops`; 0 for none."""
        self.held = array("I", [0])
        """By state: length of the longest suffix that could still grow into a stop string."""
        self._first: dict[str, int] = {}  # where the root goes: most characters of a text begin nothing
        self._character = array("I", [0])  # the last one of the state
        self._child = array("I", [0])
        self._sibling = array("I", [0])  # the next child of the same parent: as many as there are stop strings at most
        for place, stop in enumerate(stops, start=1):
            self._insert(place, stop)
        self._fail = array("I", bytes(self.match.itemsize * len(self.match)))
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character; amortised constant time."""
        while state:
            following = self._find(state, ord(character))
            if following:
                return following
            state = self._fail[state]
        return self._first.get(character, 0)

    def _find(self, state: int, code: int) -> int:
        """The child of a state, other than the root, at a character; 0 when it has none."""
        child = self._child[state]
        while child and self._character[child] != code:
            child = self._sibling[child]
        return child

    def _insert(self, place: int, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            known = self._find(state, ord(character)) if state else self._first.get(character, 0)
            state = known or self._add(state, character, depth)
        self.match[state] = place

    def _add(self, parent: int, character: str, depth: int) -> int:
        state = len(self.match)
        self.match.append(0)
        self.held.append(depth)
        self._character.append(ord(character))
        self._child.append(0)
        self._sibling.append(self._child[parent] if parent else 0)
        if parent:
            self._child[parent] = state
        else:
            self._first[character] = state
        return state

    def _link(self) -> None:
        """Fill in, breadth first, where each state falls back to (one character: the root), and what it inherits."""
        queue = deque(self._first.values())
        while queue:
            state = queue.popleft()
            back, child = self._fail[state], self._child[state]
            self.match[state] = self.match[state] or self.match[back]
            if not child:
                self.held[state] = self.held[back]  # complete: nothing longer can come of it
            while child:
                self._fail[child] = self.step(back, chr(self._character[child]))
                queue.append(child)
                child = self._sibling[child]


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
            if armed and (place := match[state]):
                stop = self._matcher.stops[place]
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
