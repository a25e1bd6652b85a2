"""Whether a silent worker uses its processor: one that is busy is late, one that does not is stuck.

Asked by `worker_client.py`, which gives the first one more time.
"""

from __future__ import annotations

from typing import Final

_WINDOW_S: Final = 0.5
_SHARE: Final = 0.05


class Pulse:
    """Compares readings of the worker's processor seconds, at least a window apart."""

    def __init__(self) -> None:
        self._read_s = self._work_s = 0.0
        self._beats = False

    def beats(self, now_s: float, work_s: float | None) -> bool:
        """At the time `now_s` the worker has used `work_s`, None where that cannot be told."""
        elapsed_s = now_s - self._read_s
        if elapsed_s > _WINDOW_S and work_s is not None:
            self._beats = work_s - self._work_s > _SHARE * elapsed_s
            self._read_s, self._work_s = now_s, work_s
        return self._beats
