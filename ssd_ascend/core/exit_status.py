"""How a process ended, in words. For whoever starts processes: draft workers, ranks, engines, the roles of a plan."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """What the `returncode` of a child says, as "the process ..." goes on: below 0 it is the signal that ended it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-status}"
