"""Which branches a round of captured graphs decodes: how many, by the clock, and for which outcomes, by their odds.

Graphs are made for a few widths. More branches hit more often; past some number they make the target wait. So the width
is the one with most tokens per second, by what rounds of each width took. Used by `draft_worker.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Rows

from ssd_ascend.speculation.outcome_odds import OutcomeOdds, Pick
from ssd_ascend.speculation.recent import Recent

_WAITED = 0.05
"""A worker that waited for less than this share of a round is what the target waits for."""
_STALE = 512
"""Rounds after which what a width took is measured again."""
_ENOUGH, _KEPT = 3, 9
"""Measurements of a width before they count, as some rounds read a prompt as well, and how many of them count."""
_REFRESH = 32
"""Rounds for which a choice of outcomes is kept: sorting them takes longer than it gains."""


class _Clock:
    """Of rounds with one set of widths: how long each width takes the worker, and how long the target takes."""

    def __init__(self) -> None:
        self._work_s: dict[int, list[float]] = {}
        self._measured: dict[int, int] = {}
        self.target_s = Recent()

    def saw_work(self, width: int, seconds: float, now: int) -> None:
        """now: number of the round."""
        if now - self._measured.get(width, now) >= _STALE:
            self._work_s.pop(width)
        self._work_s.setdefault(width, []).append(seconds)
        del self._work_s[width][:-_KEPT]
        self._measured[width] = now

    def work_s(self, width: int, now: int) -> float:
        """What rounds of this width take; 0 until enough of them were measured, and when that was long ago."""
        times = self._work_s.get(width, ())
        if len(times) < _ENOUGH or now - self._measured[width] >= _STALE:
            return 0.0
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
        """Tokens per second of a sequence; a width that was not measured of late is tried, as if it took no time."""
        if width not in self._tokens:
            self._tokens[width] = self._odds.tokens_per_round(
                self._counts(self._lookahead), self._counts(0), self._lookahead, width
            )
        return self._tokens[width] / max(clock.work_s(width, self._round), clock.target_s.typical or 0.0, 1e-6)

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
        now, self._now = self._now, None
        if now is None or not usual:
            return
        clock, width = now
        clock.saw_work(width, worked_s, self._round)
        if waited_s > _WAITED * worked_s:  # else the target was done before
            clock.target_s.add(waited_s + worked_s)
