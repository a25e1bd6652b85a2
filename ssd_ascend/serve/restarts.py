"""How many engines a server may lose before it gives up: `server.py` counts every one here, and asks for another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 600.0


class Restarts:
    """The engines that were lost within ten minutes. One that never was ready makes none before it forgotten: however
    long engines take to fail, there is an end to it."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._losses: deque[float] = deque()

    def may_follow(self, *, was_ready: bool) -> bool:
        """Count a loss; whether there were few enough for another engine. was_ready: whether the lost one had been."""
        now = self._clock()
        self._losses.append(now)
        while was_ready and now - self._losses[0] > _WINDOW_S:
            self._losses.popleft()
        return len(self._losses) <= self._most

    def __str__(self) -> str:
        return f"lost engines: {len(self._losses)}, with --max-restarts {self._most}"
