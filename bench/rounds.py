"""Where a round of decoding goes: verification, waiting for drafts, messages, and the host. Used by `bench/pairs.py`.

The parts are times of the host. Its forward, what it does while the device works, and the verdict's copy, which waits
for the device, are the verification (of a step that was queued before, what is left of it);
with `sd`, whose drafter shares the device, the drafter's time on it is in there too (`verify_and_draft_ms`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.samples import NS_PER_MS, Sample, Step
from bench.summary import Row, put


def put_round(row: Row, samples: Sequence[Sample]) -> None:
    """Add the parts of a mean decode step in milliseconds, and what a round costs whose drafts were all foreseen."""
    steps = [step for sample in samples for step in sample.decode_steps]
    if not steps:
        return
    drafts_here = any("draft" in step.spans_ns for step in steps)
    waits = any("wait" in step.spans_ns for step in steps)
    verify = _mean(steps, "forward", "meanwhile", "verify")
    draft, wait = _mean(steps, "draft"), _mean(steps, "wait")
    told = _mean(steps, "observe") - _mean(steps, "ahead")  # in which the next step may be queued, the host's own part
    message = told + max(0.0, _mean(steps, "propose") - wait) if waits else 0.0
    round_ms = statistics.mean(step.wall_ns for step in steps) / NS_PER_MS
    row["round_ms"] = round(round_ms, 4)
    row["verify_and_draft_ms" if drafts_here else "round_verify_ms"] = round(verify + draft, 4)
    row["round_wait_ms"] = round(wait, 4)
    row["round_message_ms"] = round(message, 4)
    row["round_host_ms"] = round(round_ms - verify - draft - wait - message, 4)
    if waits:
        whole = [step for step in steps if step.spans_ns.get("inputs")] or steps  # not queued in the step before
        _put_hits(row, steps, _mean(whole, "forward", "meanwhile", "verify"))


def _put_hits(row: Row, steps: Sequence[Step], verify_ms: float) -> None:
    """`over_longest_ms`: a round on hits less the longer of verification and the worker's own work."""
    busy = statistics.mean(step.wall_ns - step.idle_ns for step in steps) / NS_PER_MS
    row["worker_busy_ms"] = round(busy, 4)
    on_hits = [step.wall_ns / NS_PER_MS for step in steps if step.hits and step.hits == step.num_rows]
    if on_hits:
        put(row, "ms_per_hit_step", on_hits, 4)
        row["over_longest_ms"] = round(statistics.median(on_hits) - max(verify_ms, busy), 4)


def _mean(steps: Sequence[Step], *spans: str) -> float:
    """Milliseconds per step under these spans."""
    return sum(step.spans_ns.get(span, 0) for step in steps for span in spans) / len(steps) / NS_PER_MS
