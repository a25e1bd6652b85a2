"""Notices a server of the plan that hangs: it holds its port and answers nothing, so nobody sees it end.

`fleet.py` watches every target so. The router passes over one that is silent for seconds; this is about minutes, after
which it will not come back by itself.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from ssd_ascend.engine.step_watch import USUAL_S
from ssd_ascend.serve.router import health_of
from ssd_ascend.serve.routing import Replica

_LONGEST_WAIT_S: Final = 10.0


def limit_of(step_timeout_s: float | None) -> float:
    """How long a server may be silent, after the flag for its engine's steps. Its front end answers between steps and
    within them, so the device does not matter."""
    if step_timeout_s is None:
        return USUAL_S
    return step_timeout_s or math.inf


async def until_silent(host: str, port: int, limit_s: float) -> None:
    """Return once a server that has answered before leaves every question unanswered for `limit_s`.

    What it refuses, or says in any other way than it should, is a sign of life. Only the time that we waited counts, a
    question at a time: if it was we who were stopped, what it said meanwhile comes with the next.
    """
    wait_s = min(limit_s / 4.0, _LONGEST_WAIT_S)
    silent_s, has_answered = 0.0, False
    while silent_s < limit_s:
        try:
            async with asyncio.timeout(wait_s):
                await health_of(Replica("", host, port))
            silent_s, has_answered = 0.0, True
        except TimeoutError:
            silent_s += wait_s if has_answered else 0.0
            continue
        except (OSError, ValueError):
            silent_s = 0.0
        await asyncio.sleep(wait_s)
