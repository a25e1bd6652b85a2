"""One forward on every rank of the target. Rank 0 says what comes, in a small message, before it builds its own batch.

Used by `executor.py`, and by what queues steps before they are asked for; `rank.py` is the other end of the line. All
ranks run the same steps in the same order, whatever becomes of them: a step that nobody takes is run by all alike.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext

import torch

from ssd_ascend import trace
from ssd_ascend.backends.base import Collectives
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.core.speculation import Speculation
from ssd_ascend.distributed.launch import Ranks
from ssd_ascend.engine.step_message import Step, StepWriter, Tokens
from ssd_ascend.errors import first_line
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.inputs import Row, build_batch, place_drafts
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.runtime.pack import index_on
from ssd_ascend.runtime.sampler import top_tokens

_log = get_logger(__name__)


class AllRanks:
    """The target as rank 0 has it; `ranks` are the others, None where there are none. Every method raises WorkerError
    when one is lost; of what a device or a collective says of that, `explaining`, which is around whole steps, makes
    one."""

    def __init__(self, runner: ModelRunner, ranks: Ranks | None = None) -> None:
        self.runner = runner
        self._ranks = ranks
        self._writer = StepWriter()

    def run(self, mode: Mode, rows: Rows[Row], *, drafts: Speculation | None = None) -> ModelOutput:
        """A forward of these rows. `drafts` replaces placeholders by tokens that the device has."""
        with trace.span("inputs"):
            self._announce(mode, rows, Tokens.GIVEN if drafts is None else Tokens.BROADCAST)
            batch = _build(self.runner, mode, rows)
            if drafts is not None:
                place_drafts(batch.input_ids, drafts)
        with trace.span("forward"):
            if drafts is not None and self._ranks is not None:
                self._ranks.collectives.broadcast(batch.input_ids)
            return self._forward(batch)

    def run_after(self, last: ModelOutput, rows: Rows[Row]) -> ModelOutput:
        """A decode step whose tokens no host has seen: that of a row is the arg-max in row `tokens[0]` of `last`,
        which is the output of the latest step."""
        self._announce(Mode.DECODE, rows, Tokens.CHOSEN)
        return self._forward(_build(self.runner, Mode.DECODE, rows, chosen(last, rows)))

    def run_staged(self, batch: ForwardBatch, rows: Rows[Row], *, placed: bool = False) -> ModelOutput:
        """A batch that lies in its buffers already. placed: the device wrote tokens and places there itself, where
        `rows` have placeholders."""
        self._announce(batch.mode, rows, Tokens.PLACED if placed else Tokens.GIVEN)
        if placed and self._ranks is not None:
            share_places(batch, self._ranks.collectives)
        return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> ModelOutput:
        output = self.runner.forward(batch)
        self.check()  # a device that was given work after the loss would be waited for, and nothing would end that
        return output

    def _announce(self, mode: Mode, rows: Rows[Row], tokens: Tokens) -> None:
        if self._ranks is not None:
            self._ranks.leader.post(self._writer.pack(mode, rows, tokens))

    def explaining(self) -> AbstractContextManager[None]:
        """Inside, an error of the device that comes of a lost rank is a WorkerError. Not to be nested: each gives a
        loss a moment to show."""
        return nullcontext() if self._ranks is None else self._ranks.explaining()

    def check(self) -> None:
        """Raises WorkerError when a rank was lost while the device worked: its output means nothing then."""
        if self._ranks is not None:
            self._ranks.leader.check()

    def health(self) -> str | None:
        """None when all ranks are there, else one sentence."""
        return None if self._ranks is None else self._ranks.leader.failure

    def close(self) -> None:
        """Send the other ranks home."""
        if self._ranks is not None:
            try:
                if self._ranks.leader.failure is None:
                    finish(self.runner)
            except RuntimeError as error:  # a rank was lost at this moment
                _log.warning("steps that were under way came to nothing: %s", first_line(error))
            drop_graphs(self.runner)
            self._ranks.close()


def run_announced(runner: ModelRunner, collectives: Collectives, step: Step, last: ModelOutput | None) -> ModelOutput:
    """What every other rank does for each method above. last: what it gave before."""
    ids = None
    if step.tokens is Tokens.CHOSEN:
        assert last is not None, "nothing was run before a step that goes on from it"
        ids = chosen(last, step.rows)
    batch = _build(runner, step.mode, step.rows, ids)
    if step.tokens is Tokens.BROADCAST:
        collectives.broadcast(batch.input_ids)
    elif step.tokens is Tokens.PLACED:
        share_places(batch, collectives)
    return runner.forward(batch)


def _build(runner: ModelRunner, mode: Mode, rows: Rows[Row], ids: torch.Tensor | None = None) -> ForwardBatch:
    return build_batch(
        mode, rows, block_size=runner.block_size, device=runner.device, input_ids=ids, staging=runner.graphs
    )


def chosen(last: ModelOutput, rows: Rows[Row]) -> torch.Tensor:
    """The arg-max of each row's row of logits. Logits are whole, and the same, on every rank: nobody need be told."""
    tokens = top_tokens(last.logits)[0] if last.greedy is None else last.greedy[:, 0]
    tokens = tokens.clamp(min=0)  # -1: no finite logits, and the row ends
    index = [row.tokens[0] for row in rows]
    if index == list(range(len(tokens))):
        return tokens
    return tokens.index_select(0, index_on(index, tokens.device))


def share_places(batch: ForwardBatch, collectives: Collectives) -> None:
    """Have rank 0's tokens, positions, slots and lengths on every rank, in one broadcast."""
    meta = batch.attention
    count, rows = sum(meta.query_lens_host), len(meta.query_lens_host)  # buffers may be longer, and not alike
    parts = [batch.input_ids[:count], batch.positions[:count], meta.slot_mapping[:count], meta.kv_lens[:rows]]
    numbers = collectives.broadcast(torch.cat([part.long() for part in parts]))
    if collectives.rank != 0:
        for part, found in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
            part.copy_(found)


def finish(runner: ModelRunner) -> None:
    """Wait for steps that nobody has taken: the group of ranks must not end under them."""
    if runner.device.type != "cpu":
        done = torch.Event(device=runner.device)
        done.record()
        done.synchronize()


def drop_graphs(runner: ModelRunner) -> None:
    """Free what was captured: a group of ranks does not end while graphs of its collectives live."""
    runner.graphs = None
    gc.collect()
