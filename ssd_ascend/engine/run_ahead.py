"""The next step of plain decoding, queued before this one's tokens are known: the device need not wait for the host.

A greedy row's next input is the arg-max that the device has itself, and everything else about it is known beforehand.
So while the device decodes step n + 1, the host reads, commits and schedules step n. Called by `executor.py`; nobody
else knows. A row that turns out to have ended is left out of what was computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import NamedTuple, Protocol

from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.core.plan import StepPlan
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Arriving, index_on


class Ahead(Protocol):
    """What queues steps before it is asked for them: single ones here, whole rounds in `rounds_ahead.py`."""

    slots: int
    """KV slots that a sequence needs beyond those of the step it is in; see `Scheduler.slots_ahead`."""

    def take(self, plan: StepPlan, speculation: Speculation) -> ModelOutput | None:
        """The output for the decode rows of this plan, if they are all under way."""
        ...

    def queue_next(self, plan: StepPlan, speculation: Speculation, output: ModelOutput) -> ModelOutput:
        """Queue the step after this one where that can be; returns the output, whose `verdict` is then on its way."""
        ...


class _Queued(NamedTuple):
    """A step that is under way: the row of each sequence, the position it computes, and what will come of it."""

    rows: dict[int, int]
    starts: list[int]
    output: ModelOutput


class RunAhead:
    """At most one step is queued, and the next call either takes it or drops it.

    What a dropped step wrote, it wrote behind the tokens of sequences, where whoever computes there writes again.
    """

    slots = 1

    def __init__(self, target: AllRanks) -> None:
        self._target = target
        self._queued: _Queued | None = None
        self._taken: tuple[ModelOutput, list[int]] | None = None
        """All rows of the step that was taken last, and which of them are the plan's."""

    def take(self, plan: StepPlan, speculation: Speculation) -> ModelOutput | None:
        """See `Ahead`; nobody drafts here."""
        queued, self._queued, self._taken = self._queued, None, None
        if queued is None or not plan.decoding:
            return None
        index = []
        for row in plan.decoding:
            found = queued.rows.get(row.seq.id)
            if found is None or queued.starts[found] != row.seq.num_tokens - 1:
                return None
            index.append(found)
        self._taken = (queued.output, index)
        return only(queued.output, index)

    def queue_next(self, plan: StepPlan, speculation: Speculation, output: ModelOutput) -> ModelOutput:
        """See `Ahead`."""
        going = [i for i, row in enumerate(plan.decoding) if row.seq.num_remaining > 1]
        seqs = [plan.decoding[i].seq for i in going]
        graphs, size = self._target.runner.graphs, self._target.runner.block_size
        if graphs is None or output.greedy is None or plan.prefills or not seqs:
            return output
        if not all(row.seq.sampling.wants_only_arg_max for row in plan.decoding):
            return output
        if any(len(seq.block_table) * size <= seq.num_tokens for seq in seqs):
            return output
        output = replace(output, verdict=Arriving(output.greedy))  # before the next replay writes there again
        last, places_in = self._taken or (output, list(range(len(plan.decoding))))
        rows = [Row((places_in[i],), seq.num_tokens, seq.block_table, 1) for i, seq in zip(going, seqs, strict=True)]
        following = self._target.run_after(last, rows)
        places = {seq.id: i for i, seq in enumerate(seqs)}
        self._queued = _Queued(places, [row.start for row in rows], following)
        return output


def rows_of(first: Rows[int], num_drafts: Rows[int]) -> list[int]:
    """The rows of a verification that count: each sequence's own token, and its drafts behind that."""
    return [at for start, drafts in zip(first, num_drafts, strict=True) for at in range(start, start + drafts + 1)]


def only(output: ModelOutput, rows: list[int]) -> ModelOutput:
    """These rows of an output."""
    if rows == list(range(output.logits.shape[0])):
        return output
    index = index_on(rows, output.logits.device)
    greedy = None if output.greedy is None else output.greedy.index_select(0, index)
    return ModelOutput(logits=output.logits.index_select(0, index), greedy=greedy)
