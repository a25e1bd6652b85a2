"""What a sequence gets whose outcome was not foreseen: a short chain, an n-gram, or nothing, by what it is worth.

Every row of the batch waits while the missing ones are drafted for, so draft token i is worth drafting only while
num_missing * a**i > num_rows * rate * t_step: what it brings must exceed what the wait costs, with a the chance that a
draft stands, rate the tokens a row gains per second of verification, and t_step the time of one more draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Literal

from ssd_ascend.speculation.base import DraftSequence
from ssd_ascend.speculation.ngram import NgramIndex
from ssd_ascend.speculation.recent import Recent

OnMiss = Literal["auto", "draft", "ngram", "decline"]
_BLEND = 0.1
_LONG_S = 0.015
"""Beside a verification of so long, asking for an n-gram costs little; beside a shorter one, more than it brings."""
_SELDOM, _TRY_AGAIN = 0.1, 64
"""Where so few of those asked for are found, only one in so many rounds asks."""


class FallbackPolicy:
    """Chooses by measurement in `auto`; the other choices are fixed."""

    def __init__(self, on_miss: OnMiss) -> None:
        self._on_miss = on_miss
        self._indexes: dict[int, NgramIndex] = {}
        # as in other texts, until there is evidence
        self._acceptance, self._tokens_per_round, self._ngrams_found = 0.6, 2.0, 0.5
        self._rounds = 0
        self._verify_s, self._step_s = Recent(), Recent()

    @property
    def uses_ngram(self) -> bool:
        """Whether rows without a chain may get an n-gram."""
        return self._on_miss in ("auto", "ngram")

    def depth(self, *, num_missing: int, num_rows: int, lookahead: int, whole: bool = False) -> int:
        """Draft tokens for the missing rows. whole: chains of `lookahead` come in one go, so it is all or nothing."""
        if self._on_miss == "draft":
            return lookahead
        if self._on_miss != "auto":
            return 0
        step_s, verify_s = self._step_s.typical, self._verify_s.typical
        if step_s is None or verify_s is None:
            return lookahead if whole else min(2, lookahead)  # short at first: it measures what a draft costs
        price = num_rows * self._tokens_per_round / max(verify_s, 1e-9) * step_s
        if whole:
            brings = num_missing * sum(self._acceptance**i for i in range(1, lookahead + 1))
            return lookahead if brings > price * lookahead else 0
        depth, value = 0, num_missing * self._acceptance
        while depth < lookahead and value > price:
            depth, value = depth + 1, value * self._acceptance
        return depth

    def worth_from(self, *, num_rows: int, lookahead: int, whole: bool) -> int:
        """The fewest missing rows of so many that something would be drafted for; one where that is cheap to ask."""
        if self._on_miss == "decline":
            return num_rows + 1
        verify_s = self._verify_s.typical
        if self._on_miss != "auto" or verify_s is None or (verify_s > _LONG_S and self._ngrams_come()):
            return 1
        for num_missing in range(1, num_rows + 1):
            if self.depth(num_missing=num_missing, num_rows=num_rows, lookahead=lookahead, whole=whole):
                return num_missing
        return num_rows + 1

    def _ngrams_come(self) -> bool:
        """Whether this text repeats itself, or it is time to look again."""
        self._rounds += 1
        return self._ngrams_found > _SELDOM or self._rounds % _TRY_AGAIN == 0

    def ngrams(self, seqs: Rows[DraftSequence], lookahead: int) -> list[list[int]]:
        """An n-gram continuation for each sequence; empty where there is none."""
        found = []
        for seq in seqs:
            index = self._indexes.setdefault(seq.id, NgramIndex())
            index.update(seq.token_ids)
            found.append(index.propose(lookahead))
            self._ngrams_found += _BLEND * (bool(found[-1]) - self._ngrams_found)
        return found

    def forget(self, seq_ids: Rows[int]) -> None:
        """Drop the n-gram indexes of sequences that are gone."""
        for seq_id in seq_ids:
            self._indexes.pop(seq_id, None)

    # -- measurements ------------------------------------------------------------------------------------------------

    def saw_outcome(self, num_drafted: int, num_accepted: int) -> None:
        """A speculation of this worker was judged; what lies behind the first draft that fell was never looked at."""
        self._tokens_per_round += _BLEND * (num_accepted + 1 - self._tokens_per_round)
        for stood in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafted):
            self._acceptance += _BLEND * (stood - self._acceptance)

    def saw_chain(self, depth: int, seconds: float) -> None:
        """An on-demand chain of `depth` tokens took this long."""
        self._step_s.add(seconds / depth)

    def saw_verification(self, seconds: float) -> None:
        """The target took this long from an answer to its next request."""
        self._verify_s.add(seconds)
