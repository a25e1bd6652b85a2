"""Which branches a round of captured graphs decodes: how many, by the clock, and for which outcomes, by their odds.

Graphs are made for a few widths. More branches hit more often; past some number they make the target wait. So the width
is the one with most tokens per second, by how long rounds of each width lasted from one request of the target to the
next: whether guesses came in time shows there, and nowhere else. Used by `draft_worker.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Rows

from ssd_ascend.speculation.outcome_odds import OutcomeOdds, Pick

_STALE = 2048
"""Rounds after which what a width led to is measured again."""
_ENOUGH, _KEPT = 6, 15
"""Measurements of a width before they count, as some rounds read a prompt as well, and how many of them count."""
_PAUSE = 8.0
"""A worker that waits for so many times longer than it worked has an idle target, which says nothing."""
_REFRESH = 32
"""Rounds for which a choice of outcomes is kept: sorting them takes longer than it gains."""


class _Clock:
    """How long rounds with each of one set of widths last."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}
        self._measured: dict[int, int] = {}

    def saw(self, width: int, seconds: float, now: int) -> None:
        """now: number of the round."""
        if now - self._measured.get(width, now) >= _STALE:
            self._seconds.pop(width)
        self._seconds.setdefault(width, []).append(seconds)
        del self._seconds[width][:-_KEPT]
        self._measured[width] = now

    def typical(self, width: int, now: int) -> float | None:
        """None until enough rounds of this width were measured, and when that was long ago."""
        times = self._seconds.get(width, ())
        if len(times) < _ENOUGH or now - self._measured[width] >= _STALE:
            return None
        return statistics.median(times)


class Guesser:
    """For one worker. `counts`: the most guesses per depth for a speculation of so many drafts."""

    def __init__(
        self, counts: Callable[[int], Rows[int]], odds: OutcomeOdds, lookahead: int, *, by_clock: bool
    ) -> None:
        """by_clock: whether there is a target beside the worker; without, the most branches are the best."""
        self._counts = counts
        self._odds = odds
        self._lookahead = lookahead
        self._by_clock = by_clock
        self._clocks: dict[tuple[bool, tuple[int, ...]], _Clock] = {}
        self._round = 0
        self._now: tuple[_Clock, int] | None = None
        """The clock of this round, and its width."""
        self._before: tuple[_Clock, int] | None = None
        """Likewise, of the round before: it is still felt in this one."""
        self._picks: dict[tuple[int, int, int], list[Pick]] = {}
        self._tokens: dict[int, float] = {}

    # -- what a drafter asks -----------------------------------------------------------------------------------------

    def width(self, widths: Rows[int], *, ahead: bool) -> int:
        """How many of these numbers of branches a sequence shall have. ahead: in which kind of round."""
        self._round += 1
        if self._round % _REFRESH == 0:
            self._picks.clear()
            self._tokens.clear()
        clock = self._clocks.setdefault((ahead, tuple(widths)), _Clock())
        best = max(widths)
        if self._by_clock and len(widths) > 1:
            best = max(widths, key=lambda width: (self._rate(clock, width), width))
        self._now = clock, best
        return best

    def _rate(self, clock: _Clock, width: int) -> float:
        """Tokens per second of a sequence; a width that was not measured of late is tried, the widest first."""
        seconds = clock.typical(width, self._round)
        if seconds is None:
            return math.inf
        if width not in self._tokens:
            self._tokens[width] = self._odds.tokens_per_round(
                self._counts(self._lookahead), self._counts(0), self._lookahead, width
            )
        return self._tokens[width] / seconds

    def picks(self, num_drafts: int, num_ranks: int, most: int) -> list[Pick]:
        """(depth, rank) of up to `most` guesses for a sequence with so many drafts, by depth; a tiny vocabulary has
        fewer ranks than were asked for."""
        key = num_drafts, num_ranks, most
        if key not in self._picks:
            counts = [min(count, num_ranks) for count in self._counts(num_drafts)]
            self._picks[key] = sorted(pick for _, pick in self._odds.ranked(counts, num_drafts)[:most])
        return self._picks[key]

    # -- what the worker tells ---------------------------------------------------------------------------------------

    def saw_round(self, waited_s: float, worked_s: float, *, usual: bool) -> None:
        """The worker worked so long on a request, and waited so long for the next one. usual: false for a round that
        says nothing, because somebody waited for drafts in it."""
        before, now = self._before, self._now
        self._before, self._now = now, None
        if now is not None and now == before and usual and waited_s < _PAUSE * worked_s:
            clock, width = now
            clock.saw(width, waited_s + worked_s, self._round)
