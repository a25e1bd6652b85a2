"""The next verification of `ssd`, queued as soon as its drafts are looked up: the host commits and schedules beside it.

When every outcome of a step was foreseen, or is known to get nothing, the next step's rows are known before the
scheduler commits this one's. `SsdSpeculator.observe` queues them here; `executor.py` takes what is under way, as it
does with `run_ahead.py` and `rounds_ahead.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.engine.run_ahead import only, rows_of
from ssd_ascend.runtime.graphs import Prepared
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Arriving, Picked
from ssd_ascend.speculation.base import NextRow


class _Queued(NamedTuple):
    """A step that is under way: drafts of each row, the first of its tokens, what will come of it, and the verdict."""

    num_drafts: list[int]
    first: list[int]
    output: ModelOutput
    verdict: Arriving


class _Ready(NamedTuple):
    """What is prepared for the step after the one under way, if all of these sequences go on with drafts."""

    seqs: list[Sequence]
    inputs: Prepared

    def is_for(self, rows: Rows[NextRow]) -> bool:
        """Whether these are they."""
        return [row.seq for row in rows] == self.seqs and any(row.drafts for row in rows)


class HitsAhead:
    """At most one step is queued; the next call either takes it or drops it.

    What a step wrote that nobody takes lies behind the tokens of its sequences, where whoever computes there writes
    again; the scheduler lets nobody else have those blocks before.
    """

    def __init__(self, target: AllRanks, *, lookahead: int) -> None:
        self.slots = lookahead + 1
        self._target = target
        self._ready: _Ready | None = None
        self._queued: _Queued | None = None

    def queue(self, rows: Rows[NextRow]) -> bool:
        """Run these now; False, and nothing done, where that takes the host, or room that they lack. The device waits
        for this."""
        ready, self._ready = self._ready, None
        packed = [_row(row) for row in rows]
        graphs, batch = self._target.runner.graphs, None
        if graphs is not None and ready is not None and ready.is_for(rows):
            batch = graphs.stage_prepared(ready.inputs, packed)
        if batch is None:
            batch = self._stage(rows, packed)
        if batch is None:
            return False
        output = self._target.run_staged(batch, packed)
        num_drafts = [len(row.drafts) for row in rows]
        first = list(accumulate((count + 1 for count in num_drafts), initial=0))
        assert output.greedy is not None, "captured steps bring it"
        self._queued = _Queued(num_drafts, first, output, Arriving(output.greedy))
        return True

    def practise(self, rows: Rows[NextRow]) -> None:
        """Do what `queue` does, but for the launch; see `practice.py`."""
        if self._ready is not None and self._ready.is_for(rows):
            self._ready.inputs.send([_row(row) for row in rows], aside=True)

    def _stage(self, rows: Rows[NextRow], packed: Rows[Row]) -> ForwardBatch | None:
        """Into the buffers of a graph, with nothing prepared."""
        graphs, size = self._target.runner.graphs, self._target.runner.block_size
        if graphs is None or not rows or not all(row.seq.sampling.wants_only_arg_max for row in rows):
            return None
        if any(row.end > len(row.seq.block_table) * size for row in rows):
            return None
        return graphs.stage(Mode.VERIFY if any(row.drafts for row in rows) else Mode.DECODE, packed)

    def _prepare(self, seqs: list[Sequence]) -> _Ready | None:
        """Have ready what does not depend on the verdict. Whatever that is, the next step of a sequence begins behind
        its last token, within this step's drafts."""
        graphs = self._target.runner.graphs
        if graphs is None or not seqs:
            return None
        tables, starts = [seq.block_table for seq in seqs], [seq.num_tokens for seq in seqs]
        inputs = graphs.prepare(tables, starts, longest=self.slots, span=2 * self.slots - 1)
        return None if inputs is None else _Ready(seqs, inputs)

    def take(self, plan: StepPlan, speculation: Speculation) -> ModelOutput | None:
        """See `Ahead`. The speculator has said which rows of the step are whose."""
        queued, self._queued, self._ready = self._queued, None, None
        if queued is None or not speculation.under_way:
            return None
        assert [queued.num_drafts[row] for row in speculation.under_way] == speculation.num_tokens
        first = [queued.first[row] for row in speculation.under_way]
        rows = rows_of(first, speculation.num_tokens)
        return replace(only(queued.output, rows), verdict=Picked(queued.verdict, rows))

    def queue_next(self, plan: StepPlan, speculation: Speculation, output: ModelOutput) -> ModelOutput:
        """See `Ahead`: before the verdict is there nothing can be queued, but that sent for, and buffers made ready."""
        sampled = plan.sampled
        if output.greedy is None or not all(seq.sampling.wants_only_arg_max for seq in sampled):
            return output  # whose tokens it takes more to tell
        if output.verdict is None:
            output = replace(output, verdict=Arriving(output.greedy))
        self._ready = self._prepare(sampled)
        return output


def _row(row: NextRow) -> Row:
    count = len(row.drafts) + 1
    return Row((row.token, *row.drafts), row.end - count, row.seq.block_table, count)
