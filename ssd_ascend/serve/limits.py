"""Who is let in, and who is asked to come back later: 429 with Retry-After. `serve/state.py` holds one of each."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from ssd_ascend.serve.errors import ApiError

_MOST_CLIENTS = 10_000
_LONGEST_WAIT_S = 60


class RateLimit:
    """A bucket of `per_minute` requests for every client, filled evenly. The clients seen longest ago are forgotten."""

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Requests left, and when that was so."""

    def take(self, client: str) -> dict[str, str]:
        """Let one request of `client` through; gives the headers that tell it how many are left. Raises ApiError."""
        now, rate = self._clock(), self.per_minute / 60
        left, then = self._buckets.pop(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * rate)
        is_allowed = left >= 1
        self._buckets[client] = (left - is_allowed, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if not is_allowed:
            wait_s = math.ceil((1 - left) / rate)
            raise ApiError(
                429,
                f"over the limit of {self.per_minute} requests a minute; try again in {wait_s} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait_s)},
            )
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(int(left - 1)),
        }


class QueueLimit:
    """Bounds the sequences that wait for room in the batch, and says how long a wait would be at the recent pace."""

    def __init__(self, max_queue: int | None, max_running: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = None if max_queue is None else max_running + max_queue
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=64)

    def saw_end(self) -> None:
        """An answer has ended."""
        self._ended.append(self._clock())

    def check(self, num_open: int, num_new: int) -> None:
        """Raises ApiError 429 when `num_new` more sequences than the `num_open` there are would be too many."""
        if self._most is None or num_open + num_new <= self._most:
            return
        wait_s = self._wait_s(num_open + num_new - self._most)
        raise ApiError(
            429,
            f"{num_open} answers are under way or queued, and at most {self._most} may be; try again in {wait_s} s",
            code="queue_full",
            headers={"Retry-After": str(wait_s)},
        )

    def _wait_s(self, num_ahead: int) -> int:
        if len(self._ended) < 2:
            return 1
        pace = (self._clock() - self._ended[0]) / len(self._ended)
        return max(1, min(_LONGEST_WAIT_S, math.ceil(pace * num_ahead)))
