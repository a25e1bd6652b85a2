"""A draft worker as its target sees it, and where workers come from: a process, a thread, another host, this thread.

`worker_client.py` talks to one; `supervisor.py`, `unsupervised.py`, `worker_thread.py` and `remote_link.py` bring them.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.messages import Hello

START_TIMEOUT_S: Final = 300.0
"""How long a worker of our own may take to its hello: reading weights and capturing graphs may take their time."""


class Worker(NamedTuple):
    """A worker that said hello. `generation` tells it from the ones before it."""

    transport: Transport
    hello: Hello
    generation: int


class WorkerLink(Protocol):
    """Where workers come from. All calls return at once."""

    def current(self) -> Worker | None:
        """The worker in service, or None while there is none."""
        ...

    def report(self, generation: int, reason: str) -> None:
        """The worker of this generation is of no use any more: end it and bring another."""
        ...

    def health(self) -> str | None:
        """None when a worker is in service, else one sentence saying why there is none."""
        ...

    @property
    def restarts(self) -> int:
        """Workers lost so far."""
        ...

    @property
    def work_s(self) -> float | None:
        """Processor seconds the worker in service has used, None where that cannot be told."""
        ...

    def close(self) -> None:
        """End the worker for good."""
        ...
