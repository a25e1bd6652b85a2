"""A typical value of late: the median of the last few. Used wherever drafting is decided by measured times.

Not a mean: a prompt that shared a step, or an idle hour between two requests, must not move it.
"""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 9


class Recent:
    """The last values of one quantity."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        """One more measurement."""
        self._values.append(value)

    @property
    def typical(self) -> float | None:
        """Their median, None before the first."""
        return statistics.median(self._values) if self._values else None
