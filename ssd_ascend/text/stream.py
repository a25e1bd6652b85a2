"""The text side of one answer: tokens of a step in, text to show out; the engine's output stage keeps one per request.

The scheduler decides first, by token index, how many tokens of a run count (end of sequence, length); it feeds those.
A stop string found in them ends the answer earlier still, and `num_tokens` says after which token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_ascend.text.detokenizer import IncrementalDetokenizer
from ssd_ascend.text.stop import StopChecker


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`text` to show, tokens of the run that count, and the stop string if one ended the answer."""

    text: str
    num_tokens: int
    stop: str | None


class TextStream:
    """Detokenizes and checks for stop strings, token by token.

    No stop string ends the answer within its first `min_tokens` tokens. Pass `stops=None` when the request has none.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer, stops: StopChecker | None = None, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._length = 0

    @property
    def text_length(self) -> int:
        """Characters handed out so far."""
        return self._length

    @property
    def offsets(self) -> list[int]:
        """Where in the answer each counted token's text starts; a text that was cut is never pointed beyond."""
        if self._stops is not None and self._stops.matched is not None:
            return [min(offset, self._length) for offset in self._detokenizer.offsets]
        return self._detokenizer.offsets

    def feed(self, token_ids: Sequence[int], *, hide_last: bool = False) -> TextDelta:
        """Take the counted tokens of one step; `hide_last` gives the last one (a stop token) no text."""
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            if hide_last and index == len(token_ids) - 1:
                self._detokenizer.hide_one()
                continue
            piece = self._detokenizer.feed_one(token_id)
            if self._stops is None:
                shown.append(piece)
                continue
            shown.append(self._stops.feed(piece, armed=len(self._detokenizer.offsets) > self._min_tokens))
            if self._stops.matched is not None:
                return self._delta(shown, index + 1, self._stops.matched)
        return self._delta(shown, len(token_ids), None)

    def finish(self) -> str:
        """The rest of the text once the answer has ended; empty after a stop string."""
        if self._stops is None:
            return self._delta([self._detokenizer.flush()], 0, None).text
        if self._stops.matched is not None:
            return ""
        # the leftover of an unfinished character is not searched: the answer has ended for another reason
        rest = [self._stops.feed(self._detokenizer.flush(), armed=False), self._stops.flush()]
        return self._delta(rest, 0, None).text

    def _delta(self, shown: list[str], num_tokens: int, stop: str | None) -> TextDelta:
        text = "".join(shown)
        self._length += len(text)
        return TextDelta(text, num_tokens, stop)
