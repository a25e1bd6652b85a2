"""Prompt lookup: what followed the last time the text ended like this. No weights, no device, microseconds.

After "prompt lookup decoding" (Saxena 2023): the longest suffix of the tokens that occurred before predicts what comes
next. One index per sequence, grown with it, so a look-up does not scan the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

MAX_NGRAM = 4
MIN_NGRAM = 2
MAX_PLACES = 16
"""Earlier occurrences remembered per n-gram, the latest ones."""


class NgramIndex:
    """Where each n-gram of one sequence ends. `update` with the sequence's tokens before asking."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def update(self, token_ids: Rows[int]) -> None:
        """Take in the tokens that were added since; starts over when the sequence is not the one it was."""
        known = len(self._tokens)
        if len(token_ids) < known or (known and token_ids[known - 1] != self._tokens[-1]):
            self._tokens, self._places, known = [], {}, 0
        for token in token_ids[known:]:
            self._tokens.append(token)
            self._remember(len(self._tokens))

    def _remember(self, end: int) -> None:
        for n in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
            places = self._places.setdefault(tuple(self._tokens[end - n : end]), [])
            places.append(end)
            if len(places) > MAX_PLACES:
                del places[0]

    def continuations(self, tail: Rows[int] = ()) -> dict[int, int]:
        """How often each token followed the longest known suffix of tokens + `tail`: token -> count."""
        for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            counts: dict[int, int] = {}
            for place in self._places.get(self._suffix(n, tail), ()):
                if place < len(self._tokens):
                    token = self._tokens[place]
                    counts[token] = counts.get(token, 0) + 1
            if counts:
                return counts
        return {}

    def propose(self, lookahead: int, tail: Rows[int] = ()) -> list[int]:
        """`lookahead` tokens that followed the latest earlier occurrence of the longest known suffix; or none."""
        for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            places = self._places.get(self._suffix(n, tail), ())
            for place in reversed(places):
                if place < len(self._tokens):
                    return self._copy(place, lookahead, tail)
        return []

    def _copy(self, place: int, count: int, tail: Rows[int]) -> list[int]:
        """Tokens from `place` on; past the end of the text it goes on with `tail` and with what was copied: a loop."""
        copied = self._tokens[place : place + count]
        while len(copied) < count:
            at = place + len(copied) - len(self._tokens)
            copied.append(tail[at] if at < len(tail) else copied[at - len(tail)])
        return copied

    def _suffix(self, n: int, tail: Rows[int]) -> tuple[int, ...]:
        """The last n tokens of tokens + tail (fewer only when there are not n; then it matches nothing)."""
        if len(tail) >= n:
            return tuple(tail[len(tail) - n :])
        return tuple(self._tokens[max(0, len(self._tokens) - n + len(tail)) :]) + tuple(tail)
