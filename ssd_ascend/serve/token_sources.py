"""Where each piece of an answer came from: the extension `return_token_sources`, which the page at `/` colours by."""

from __future__ import annotations

from bisect import bisect_right

from ssd_ascend.core.speculation import Source
from ssd_ascend.engine.answers import Answer, AnswerDelta

NAMES = {Source.DECLINED: "recovery", Source.MISS: "draft", Source.HIT: "hit"}
"""The target's own token, a draft made on demand, a draft from the speculation cache."""


class TokenSources:
    """One answer. Pieces are cut where tokens are, and put together they are the text as the model said it."""

    def __init__(self) -> None:
        self._length = 0
        self._offsets: list[int] = []
        self._sources: list[int] = []

    def feed(self, delta: AnswerDelta | Answer) -> list[dict[str, str]]:
        """The pieces of the text that became known; what a token says may come later than the token."""
        self._offsets += delta.offsets
        self._sources += delta.sources or [int(Source.DECLINED)] * len(delta.offsets)
        text, at = delta.text, 0
        pieces: list[dict[str, str]] = []
        while at < len(text):
            # of tokens that begin at one place, the last one brought the text: the others were parts of a character
            owner = bisect_right(self._offsets, self._length + at) - 1
            end = self._offsets[owner + 1] - self._length if owner + 1 < len(self._offsets) else len(text)
            pieces.append({"text": text[at:end], "source": NAMES[Source(self._sources[owner])]})
            at = end
        self._length += len(text)
        return pieces
