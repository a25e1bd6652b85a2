"""Notices an engine that has work and ends no step: where a device hangs, nothing is raised, and nobody is answered.

`engine/async_engine.py` has one. An engine process reports after every step (twice a second where steps are shorter)
and whenever it runs out of work, so what is counted is how long one that owes a report is silent.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

_LONGEST_TICK_S = 1.0
_WORTH_TELLING_S = 30.0
USUAL_S: Final = 300.0
"""What a step may take, and a front end be silent, where nothing else is given."""


def usual_limit_s(device: str) -> float:
    """For an engine on this device, as `EngineInfo` names it: a processor does not hang, and the one step of a large
    model that reads 2048 tokens of a prompt may take it minutes."""
    return math.inf if device.startswith("cpu") else USUAL_S


class StepWatch:
    """Counts the silence of an engine, up to `limit_s` (which may be infinite, and may be set later)."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._owes = False
        self._silent_s = 0.0

    @property
    def tick_s(self) -> float:
        """How often to look."""
        return min(self.limit_s / 8.0, _LONGEST_TICK_S)

    @property
    def worry(self) -> str | None:
        """What is to be told of an engine that has been silent for a good part of its time, or for long enough."""
        if not self._owes or self._silent_s < min(self.limit_s / 3.0, _WORTH_TELLING_S):
            return None
        return f"no step of the engine has ended for {self._silent_s:.0f} s"

    def asked(self) -> None:
        """The engine was told something, and owes a report from now on, unless it did already."""
        if not self._owes:
            self.heard(has_work=True)

    def heard(self, *, has_work: bool) -> None:
        """A report came, of an engine that is ready. With work left, it owes another."""
        self._owes = has_work
        self._silent_s = -self.tick_s  # the tick under way is counted whole

    def tick(self, passed_s: float) -> bool:
        """Count some time that has passed; whether the engine has been silent for too long.

        Of a time much longer than a tick only a part counts: then it was we who were stopped, or busy, and what the
        engine said meanwhile is yet to be read.
        """
        if self._owes:
            self._silent_s += min(passed_s, 2.0 * self.tick_s)
        return self._silent_s >= self.limit_s

    async def wait_until_stuck(self) -> None:
        """Return when the engine has been silent for too long."""
        clock = asyncio.get_running_loop().time
        is_stuck = False
        while not is_stuck:
            before = clock()
            await asyncio.sleep(self.tick_s)
            is_stuck = self.tick(clock() - before)
