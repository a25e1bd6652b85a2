"""What links to workers of this very process have in common: nobody starts such a worker again.

What failed here would fail again. Filled in by `worker_link.py` and `worker_thread.py`.
"""

from __future__ import annotations

from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.base import Transport


class UnsupervisedLink:
    """See `WorkerLink`. `_worker` is there from when it said hello until it is reported; `_failure`: how it failed."""

    def __init__(self, line: Transport) -> None:
        self._line = line
        self._worker: Worker | None = None
        self._failure: str | None = None

    @property
    def restarts(self) -> int:
        """Nothing restarts here."""
        return 0

    @property
    def work_s(self) -> float | None:
        """Its time cannot be told from ours."""
        return None

    def current(self) -> Worker | None:
        """The worker, until it was reported."""
        return self._worker

    def report(self, generation: int, reason: str) -> None:
        """Gone for good. What the worker said itself is the better reason."""
        self._worker = None
        self._failure = self._failure or reason
        self._line.close()

    def health(self) -> str | None:
        """Why there is no worker."""
        return None if self._worker is not None else f"no speculation: {self._failure}"

    def close(self) -> None:
        """Close our end of the line."""
        self._line.close()
