"""The next round of `sd`, drafting and verification, queued before this one's verdict is on the host.

What the round needs is on the device: how many drafts stood, hence where every sequence goes on, and the drafts of the
next chain. So while the device works on round n + 1, the host reads, commits and schedules round n. Other ranks of the
target get its tokens and places from the device of the first. Called by `executor.py`, as `run_ahead.py` is, which
does the same for steps without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.engine.run_ahead import only, rows_of
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Arriving, Picked
from ssd_ascend.speculation.base import AheadSpeculator, Verdict


class RoundsAhead:
    """At most one round is queued, always of `lookahead` drafts a row; the next call either takes it or drops it.

    A row that turns out to have ended, or to have room for fewer drafts, is left out, or cut, when it is taken. What a
    round wrote that nobody takes lies behind the tokens of its sequences, where whoever computes there writes again;
    the scheduler lets nobody else have those blocks before.
    """

    def __init__(self, target: AllRanks, speculator: AheadSpeculator, *, lookahead: int) -> None:
        self.slots = lookahead + 1
        self._target = target
        self._speculator = speculator
        self._lookahead = lookahead
        self._queued: ModelOutput | None = None
        self._taken: ModelOutput | None = None
        """All rows of the round that was taken last, as its graph left them."""

    def take(self, plan: StepPlan, speculation: Speculation) -> ModelOutput | None:
        """See `Ahead`. The speculator has said which rows of the round are whose."""
        self._taken, self._queued = self._queued, None
        if self._taken is None or not speculation.under_way:
            self._taken = None
            return None
        if not plan.prefills:
            return self._taken  # judged by its verdict, of which `queue_next` picks the rows
        return only(self._taken, self._rows(speculation))

    def _rows(self, speculation: Speculation) -> list[int]:
        """The rows of the round that count."""
        return rows_of([row * self.slots for row in speculation.under_way], speculation.num_tokens)

    def queue_next(self, plan: StepPlan, speculation: Speculation, output: ModelOutput) -> ModelOutput:
        """See `Ahead`."""
        taken, self._taken = self._taken, None
        if output.greedy is None:
            return output
        seqs = [row.seq for row in plan.decoding if row.seq.num_remaining > 1]
        may = bool(seqs) and self._may_follow(plan, speculation)
        if taken is None and not may:
            return output
        arriving = Arriving(output.greedy)  # before the next replay writes there again
        if may:
            self._queue(seqs, _verdict(plan, speculation, output, self.slots))
        return replace(output, verdict=arriving if taken is None else Picked(arriving, self._rows(speculation)))

    def _may_follow(self, plan: StepPlan, speculation: Speculation) -> bool:
        """Whether nothing about the next round is the host's to decide: all rows are greedy, and have what room and
        drafts there can be."""
        runner = self._target.runner
        graphs, size, reach = runner.graphs, runner.block_size, 2 * self._lookahead + 1
        if graphs is None or plan.prefills:
            return False
        return all(
            row.seq.sampling.wants_only_arg_max
            and row.seq.sampling.speculation
            and drafts == min(self._lookahead, row.seq.num_remaining - 1)
            and len(row.seq.block_table) * size >= row.seq.num_tokens + reach
            and row.seq.num_tokens + reach <= graphs.max_len
            for row, drafts in zip(plan.decoding, speculation.num_tokens, strict=True)
        )

    def _queue(self, seqs: Rows[Sequence], verdict: Verdict) -> None:
        """Rows of a verification in their buffers; tokens and places, which the device knows, are written over."""
        graphs = self._target.runner.graphs
        assert graphs is not None
        rows = [Row((0,) * self.slots, seq.num_tokens, seq.block_table, self.slots) for seq in seqs]
        batch = graphs.stage(Mode.VERIFY, rows)
        if batch is not None and self._speculator.draft_ahead(seqs, verdict, batch):
            self._queued = self._target.run_staged(batch, rows, placed=True)


def _verdict(plan: StepPlan, speculation: Speculation, output: ModelOutput, stride: int) -> Verdict:
    """The verdict of this step, where the sequences that may go on find theirs."""
    first, num_drafts, start, at = [], [], [], 0
    for i, (row, drafts) in enumerate(zip(plan.decoding, speculation.num_tokens, strict=True)):
        if row.seq.num_remaining > 1:
            first.append(speculation.under_way[i] * stride if speculation.under_way else at)
            num_drafts.append(drafts)
            start.append(row.seq.num_tokens - 1)
        at += drafts + 1
    assert output.greedy is not None
    return Verdict(output.greedy, first, num_drafts, start)
