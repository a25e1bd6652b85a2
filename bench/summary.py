"""From samples to one flat row of a result: medians over the runs with their quartiles, and ratios run by run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

from bench.samples import NS_PER_MS, Drafting, Sample

Row = dict[str, float | int | str | None]
SPANS = ("schedule", "propose", "draft", "wait", "inputs", "forward", "verify", "observe", "commit")
"""Parts of a step as the engine's trace names them; draft and wait lie inside propose."""


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile); of fewer than four values the extremes stand for the quartiles."""
    if len(values) < 4:
        return statistics.median(values), min(values), max(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def put(row: Row, name: str, values: Sequence[float], digits: int = 3) -> None:
    """Add a measured number as `name`, `name_lo` and `name_hi`."""
    middle, low, high = spread(values)
    row |= {name: round(middle, digits), f"{name}_lo": round(low, digits), f"{name}_hi": round(high, digits)}


def summarise(name: str, batch: int, samples: Sequence[Sample], *, num_devices: int = 1) -> Row:
    """One row for the runs of one engine at one batch size."""
    row: Row = {"mode": name, "batch": batch, "runs": len(samples), "devices": num_devices}
    put(row, "tokens_per_s", [sample.decode_tokens_per_s for sample in samples])
    row["tokens_per_s_per_device"] = round(float(row["tokens_per_s"] or 0) / num_devices, 3)
    put(row, "ms_per_step", [sample.ms_per_step for sample in samples])
    put(row, "ttft_ms", [statistics.median(sample.ttft_ns) / NS_PER_MS for sample in samples])
    put(row, "prefill_tokens_per_s", [sample.prefill_tokens_per_s for sample in samples])
    put(row, "end_to_end_tokens_per_s", [sample.num_tokens / sample.wall_s for sample in samples])
    put(row, "acceptance_length", [sample.acceptance_length for sample in samples])
    row["tokens"] = sum(sample.num_tokens for sample in samples)
    row["decode_steps"] = sum(len(sample.decode_steps) for sample in samples)
    if any(step.spans_ns for sample in samples for step in sample.steps):
        _put_breakdown(row, samples)
    _put_drafting(row, samples)
    if batch == 1:
        _put_hits_by_depth(row, samples)
    return row


def _put_breakdown(row: Row, samples: Sequence[Sample]) -> None:
    """Mean milliseconds per decode step under each span; and what is neither forward, draft nor waiting."""
    for span in SPANS:
        if any(span in step.spans_ns for sample in samples for step in sample.steps):
            row[f"{span}_ms"] = round(statistics.median(sample.span_ms(span) for sample in samples), 4)
    put(row, "own_ms", [own_ms(sample) for sample in samples], 4)
    put(row, "own_and_wait_ms", [own_ms(sample) + sample.span_ms("wait") for sample in samples], 4)
    answers = [
        step.rounds_ns / NS_PER_MS
        for sample in samples
        for step in sample.decode_steps
        if step.hits and step.hits == step.num_rows
    ]
    if answers:
        put(row, "hit_answer_ms", answers, 4)


def own_ms(sample: Sample) -> float:
    """The engine's own time per decode step: all of it but the target's forward, the drafter's, and the wait for one.

    Spans are host time: on a device that works behind the host's back, the device's time shows under `verify`, whose
    copy waits for it, and this number means nothing.
    """
    return sample.span_ms("step") - sample.span_ms("forward") - sample.span_ms("draft") - sample.span_ms("wait")


def _put_drafting(row: Row, samples: Sequence[Sample]) -> None:
    total = Drafting()
    for sample in samples:
        part = sample.drafting
        for name in ("drafted", "accepted", "lookups", "hits", "wasted"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("hit_rows_tokens", "miss_rows", "miss_rows_tokens"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.drafted_per_position = _add(total.drafted_per_position, part.drafted_per_position)
        total.accepted_per_position = _add(total.accepted_per_position, part.accepted_per_position)
        total.cache_bytes = max(total.cache_bytes, part.cache_bytes)
    if not total.drafted and not total.lookups:
        return
    row |= {"drafted": total.drafted, "accepted": total.accepted, "wasted": total.wasted}
    for position, (drafted, accepted) in enumerate(
        zip(total.drafted_per_position, total.accepted_per_position, strict=True), 1
    ):
        row[f"accepted_at_{position}"] = round(accepted / drafted, 4) if drafted else None
    if total.lookups:
        row |= {"lookups": total.lookups, "hits": total.hits, "hit_rate": round(total.hits / total.lookups, 4)}
        row["tokens_per_hit"] = round(total.hit_rows_tokens / total.hits, 3) if total.hits else None
        row["tokens_per_miss"] = round(total.miss_rows_tokens / total.miss_rows, 3) if total.miss_rows else None
        row["cache_bytes"] = total.cache_bytes
        put(row, "draft_idle_ms", [sample.draft_idle_ms for sample in samples])


def _put_hits_by_depth(row: Row, samples: Sequence[Sample]) -> None:
    """How often an outcome with j drafts accepted was foreseen. Of single sequences, where a step has one outcome."""
    seen: dict[int, list[int]] = {}
    for sample in samples:
        for before, after in itertools.pairwise(sample.decode_steps):
            if after.lookups == 1:
                seen.setdefault(before.num_tokens - 1, []).append(after.hits)
    for depth, hits in sorted(seen.items()):
        row |= {f"hits_at_{depth}": round(statistics.mean(hits), 4), f"lookups_at_{depth}": len(hits)}


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    length = max(len(left), len(right))
    return [(left[i] if i < len(left) else 0) + (right[i] if i < len(right) else 0) for i in range(length)]


def put_ratio(
    row: Row,
    name: str,
    ours: Sequence[Sample],
    theirs: Sequence[Sample],
    measure: Callable[[Sample], float] = lambda sample: sample.decode_tokens_per_s,
) -> None:
    """Add ours / theirs, taken run by run: both sides of a pair had the same prompts and the same neighbours."""
    pairs = [(measure(a), measure(b)) for a, b in zip(ours, theirs, strict=True)]
    ratios = [a / b for a, b in pairs if b]
    if ratios:
        put(row, name, ratios)
