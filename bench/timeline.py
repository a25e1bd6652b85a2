"""A few consecutive rounds as they happened, for the Gantt picture: what target and speculator did when.

The worker reports how long it was idle before each request, so its work between two requests is known to the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from bench.samples import NS_PER_MS, Sample, Step

PARTS = ("schedule", "draft", "wait", "inputs", "forward", "meanwhile", "verify", "observe", "commit")
"""In the order of a step; what `propose` takes beside draft and wait is a sliver and left out."""
_ROUNDS = 10
_TOLD_LATER = 2
"""Steps after which the target knows how long the worker worked on a request."""
Bar = dict[str, Any]


def rounds(samples: Sequence[Sample], most: int = _ROUNDS) -> list[Bar]:
    """Bars {who, what, from_ms, ms, round}: consecutive decode steps from the middle of the last run."""
    steps = samples[-1].decode_steps if samples else []
    drafts_elsewhere = any("wait" in step.spans_ns for step in steps)
    needed = most + (_TOLD_LATER if drafts_elsewhere else 0)
    first = max(0, (len(steps) - needed) // 2)
    chosen = steps[first : first + needed]
    bars: list[Bar] = []
    posted: list[float] = []
    now = 0.0
    for number, step in enumerate(chosen[:most]):
        bars += _target(step, number, now)
        posted.append(now + _until_posted(step))
        now += step.wall_ns / NS_PER_MS
    return bars + (_worker(chosen, posted) if drafts_elsewhere else [])


def _target(step: Step, number: int, began: float) -> list[Bar]:
    bars = []
    for part in PARTS:
        length = step.spans_ns.get(part, 0) / NS_PER_MS
        if length:
            bar = {"who": "target", "what": part, "from_ms": round(began, 4), "ms": round(length, 4), "round": number}
            bars.append(bar | ({"tokens": step.num_tokens, "hit": step.hits > 0} if part == "verify" else {}))
        began += length
    return bars


def _until_posted(step: Step) -> float:
    """From a step's begin until its outcomes are on their way."""
    return sum(step.spans_ns.get(part, 0) for part in PARTS[:-1]) / NS_PER_MS


def _worker(steps: Sequence[Step], posted: Sequence[float]) -> list[Bar]:
    """Busy from a request until it idles before the next one; told by the answer that comes one step later."""
    bars = []
    for number, (start, after) in enumerate(itertools.pairwise(posted)):
        if number + _TOLD_LATER >= len(steps):
            break
        length = after - start - steps[number + _TOLD_LATER].idle_ns / NS_PER_MS
        if length > 0:
            bars.append({"who": "speculator", "what": "draft", "from_ms": round(start, 4), "ms": round(length, 4),
                         "round": number})  # fmt: skip
    return bars
