"""How many drafts a row should carry, by measurement: what a step of k drafts costs, and how often drafts stand.

With a the chance that a draft stands, k drafts bring 1 + a + ... + a**k tokens; the best k maximises that over the time
of a step. A fixed lookahead is kept as it is, but a drafter that costs nothing to leave out may still be told to stop.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Literal

_BLEND = 0.15
_WINDOW = 9
"""Step times remembered per number of drafts; their median is not moved by a prompt that shared a step."""
_MARGIN = 1.02
"""Drafting must promise at least this much: estimates are noisy, and not drafting is free of risk."""
_PROBE_FIRST = 8
_PROBE_MOST = 64
"""Steps between tries while drafting does not pay; doubled after every try that failed."""


@dataclass(slots=True)
class _Record:
    """One sequence: the chance that its next draft stands, and when to try again after giving up."""

    acceptance: float
    pause: int = 0
    next_pause: int = _PROBE_FIRST


class LookaheadController:
    """Chooses k for every row of a step. `may_stop`: k = 0 is allowed when drafting does not pay."""

    def __init__(self, lookahead: int | Literal["auto"], *, max_lookahead: int, may_stop: bool) -> None:
        self.max_lookahead = max_lookahead
        self._choices = tuple(range(1, max_lookahead + 1)) if lookahead == "auto" else (max_lookahead,)
        self._may_stop = may_stop or lookahead == "auto"
        self._explore = _exploration(self._choices) if self._may_stop else []
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._records: dict[int, _Record] = {}
        self._acceptance = 0.7  # as in other texts, until there is evidence
        self._started_s = 0.0

    @property
    def is_fixed(self) -> bool:
        """True when every row gets the same, whatever was seen."""
        return not self._may_stop

    def choose(self, seq_ids: Rows[int]) -> list[int]:
        """Drafts wanted per row. Starts the clock of the step. Without rows, which only reads prompts, nothing is
        tried."""
        if not seq_ids:
            return []
        self._started_s = time.perf_counter()
        if not self._may_stop:
            return [self.max_lookahead] * len(seq_ids)
        if self._explore:
            return [self._explore.pop()] * len(seq_ids)
        bucket = len(seq_ids).bit_length()
        return [self._best(bucket, self._record(seq_id)) for seq_id in seq_ids]

    def _record(self, seq_id: int) -> _Record:
        record = self._records.get(seq_id)
        if record is None:
            record = self._records[seq_id] = _Record(self._acceptance)
        return record

    def _best(self, bucket: int, record: _Record) -> int:
        plain = self._cost(bucket, 0)
        if plain is None:
            return self._choices[-1]
        best_k, best_rate = 0, _MARGIN / plain
        for k in self._choices:
            cost = self._cost(bucket, k)
            rate = (1.0 + _expected(record.acceptance, k)) / cost if cost else 0.0
            if rate > best_rate:
                best_k, best_rate = k, rate
        if best_k:
            record.pause, record.next_pause = 0, _PROBE_FIRST
            return best_k
        record.pause += 1
        if record.pause < record.next_pause:
            return 0
        record.pause, record.next_pause = 0, min(2 * record.next_pause, _PROBE_MOST)
        return self._choices[0] if len(self._choices) == 1 else min(2, self._choices[-1])

    def _cost(self, bucket: int, k: int) -> float | None:
        """Seconds of a step with k drafts: measured, else on the line through the nearest two that were, else None."""
        known = {own_k: statistics.median(times) for (b, own_k), times in self._times.items() if b == bucket}
        if k in known:
            return known[k]
        if len(known) < 2:
            return None
        near, other = sorted(known, key=lambda own_k: abs(own_k - k))[:2]
        slope = max(0.0, (known[other] - known[near]) / (other - near))
        return max(known[near] + slope * (k - near), min(known.values()))

    # -- measurements ------------------------------------------------------------------------------------------------

    def step_ended(self, num_rows: int, drafts: int) -> None:
        """The target's verdict is there: a step of `num_rows` rows, the longest with `drafts`, took since `choose`.
        To be told only of steps that did nothing else: a prompt lasts as long as many of them."""
        key = (num_rows.bit_length(), drafts)
        self._times.setdefault(key, deque(maxlen=_WINDOW)).append(time.perf_counter() - self._started_s)

    def saw(self, seq_id: int, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` drafts stood; what lies behind the first that fell was never looked at."""
        for stood in [1.0] * accepted + [0.0] * (accepted < drafted):
            record = self._record(seq_id)
            record.acceptance += _BLEND * (stood - record.acceptance)
            self._acceptance += 0.1 * _BLEND * (stood - self._acceptance)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Sequences that are gone."""
        for seq_id in seq_ids:
            self._records.pop(seq_id, None)


def _expected(acceptance: float, k: int) -> float:
    """Drafts that stand out of k, when each stands with the same chance: a + a**2 + ... + a**k."""
    return sum(acceptance**i for i in range(1, k + 1))


def _exploration(choices: Rows[int]) -> list[int]:
    """The first steps, last one first: enough of each kind to know what drafting costs, and not drafting."""
    middle = choices[len(choices) // 2]
    return [choices[-1]] * 3 + [0] * 3 + [middle] * 4
