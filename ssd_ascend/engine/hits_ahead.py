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

from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.engine.run_ahead import only, rows_of
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Arriving, Picked
from ssd_ascend.speculation.base import NextRow


class _Queued(NamedTuple):
    """A step that is under way: drafts of each row, the first of its tokens, what will come of it, and the verdict."""

    num_drafts: list[int]
    first: list[int]
    output: ModelOutput
    verdict: Arriving


class HitsAhead:
    """At most one step is queued; the next call either takes it or drops it.

    What a step wrote that nobody takes lies behind the tokens of its sequences, where whoever computes there writes
    again; the scheduler lets nobody else have those blocks before.
    """

    def __init__(self, target: AllRanks, *, lookahead: int) -> None:
        self.slots = lookahead + 1
        self._target = target
        self._queued: _Queued | None = None

    def queue(self, rows: Rows[NextRow]) -> bool:
        """Run these now; False, and nothing done, where that takes the host, or room that they lack."""
        graphs, size = self._target.runner.graphs, self._target.runner.block_size
        if graphs is None or not rows or not all(row.seq.sampling.wants_only_arg_max for row in rows):
            return False
        if any(row.end > len(row.seq.block_table) * size for row in rows):
            return False
        mode = Mode.VERIFY if any(row.drafts for row in rows) else Mode.DECODE
        packed = [_row(row) for row in rows]
        batch = graphs.stage(mode, packed)
        if batch is None:
            return False
        num_drafts = [len(row.drafts) for row in rows]
        first = list(accumulate((count + 1 for count in num_drafts), initial=0))
        output = self._target.run_staged(batch, packed)
        assert output.greedy is not None, "captured steps bring it"
        self._queued = _Queued(num_drafts, first, output, Arriving(output.greedy))
        return True

    def take(self, plan: StepPlan, speculation: Speculation) -> ModelOutput | None:
        """See `Ahead`. The speculator has said which rows of the step are whose."""
        queued, self._queued = self._queued, None
        if queued is None or not speculation.under_way:
            return None
        assert [queued.num_drafts[row] for row in speculation.under_way] == speculation.num_tokens
        first = [queued.first[row] for row in speculation.under_way]
        rows = rows_of(first, speculation.num_tokens)
        return replace(only(queued.output, rows), verdict=Picked(queued.verdict, rows))

    def queue_next(self, plan: StepPlan, speculation: Speculation, output: ModelOutput) -> ModelOutput:
        """See `Ahead`: nothing can be queued before the verdict is there, but that can be sent for."""
        if output.verdict is not None or output.greedy is None:
            return output
        if not all(seq.sampling.wants_only_arg_max for seq in plan.sampled):
            return output  # whose tokens it takes more to tell
        return replace(output, verdict=Arriving(output.greedy))


def _row(row: NextRow) -> Row:
    count = len(row.drafts) + 1
    return Row((row.token, *row.drafts), row.end - count, row.seq.block_table, count)
