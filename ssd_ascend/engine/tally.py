"""What the scheduler counts: the result of one row, into its sequence and into the totals. Torch-free.

Used by `Scheduler.commit` only. Only emitted tokens count: a draft that matched
but lies behind a stop token was drafted, not accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssd_ascend.core.request import SequenceStats
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Source, Speculation
from ssd_ascend.core.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class RowDraft:
    """What the speculator offered to one decode row, and what could have been offered."""

    max_drafts: int
    num_drafts: int = 0
    source: Source = Source.DECLINED
    looked_up: bool = False


def row_draft(speculation: Speculation | None, row: int, max_drafts: int) -> RowDraft:
    """Row `row` of `speculation`; None stands for a step in which every row declined."""
    if speculation is None:
        return RowDraft(max_drafts)
    looked_up = bool(speculation.looked_up) and speculation.looked_up[row]
    return RowDraft(max_drafts, speculation.num_tokens[row], speculation.source[row], looked_up)


def count_row(stats: SpeculationStats, seq: Sequence, draft: RowDraft, *, num_accepted: int, num_emitted: int) -> None:
    """Add one committed decode row to its sequence and to the totals.

    The totals the speculator alone can know (lookups, hits, wasted, times, worker state) are its own to write.
    """
    seq.steps += 1
    seq.drafted += draft.num_drafts
    seq.accepted += num_accepted
    seq.lookups += draft.looked_up
    seq.hits += draft.source is Source.HIT
    if draft.num_drafts == 0:
        stats.declined_rows += draft.max_drafts > 0
        return
    stats.verify_rows += 1
    stats.drafted += draft.num_drafts
    stats.accepted += num_accepted
    missing = draft.num_drafts - len(stats.drafted_per_position)
    if missing > 0:
        stats.drafted_per_position.extend([0] * missing)
        stats.accepted_per_position.extend([0] * missing)
    for position in range(draft.num_drafts):
        stats.drafted_per_position[position] += 1
        stats.accepted_per_position[position] += position < num_accepted
    if draft.source is Source.HIT:
        stats.hit_tokens += num_emitted
    else:
        stats.miss_rows += 1
        stats.miss_tokens += num_emitted


def summary(seq: Sequence) -> SequenceStats:
    """The numbers that travel with every delta of a sequence: a stop string may make any of them the last."""
    return SequenceStats(
        prompt_tokens=seq.num_prompt_tokens,
        cached_tokens=seq.num_cached_tokens,
        steps=seq.steps,
        drafted=seq.drafted,
        accepted=seq.accepted,
        lookups=seq.lookups,
        hits=seq.hits,
        preemptions=seq.num_preemptions,
    )
