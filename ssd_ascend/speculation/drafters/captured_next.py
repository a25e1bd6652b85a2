"""The next round's drafting in one graph, fed by a verdict that the host has not seen: `sd`, queued ahead.

The graph works out how many drafts stood, catches up, takes K steps, and writes the inputs of the verification that
follows where its graph reads them. Used by `paged.py`; when a round may be queued is `engine/rounds_ahead.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import numpy as np
import torch

from ssd_ascend.backends.base import Graph, GraphCapture
from ssd_ascend.core.advance import Advance, Places
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.runtime.graphs import StaticInputs
from ssd_ascend.runtime.pack import Field, write
from ssd_ascend.runtime.refusals import Refusals
from ssd_ascend.runtime.static import ahead_batch, ahead_fields, write_tables
from ssd_ascend.speculation.base import DraftSequence, Verdict
from ssd_ascend.speculation.drafters.captured_chain import roll
from ssd_ascend.speculation.drafters.feed import DraftParts, FeedSize, StaticFeed

_NOBODY = (-2, -3)
"""A last row of verdicts whose token is no draft's, and whose draft is nobody's token."""


class _Next:
    """One size: that of a captured verification, whose inputs it writes."""

    def __init__(
        self, parts: DraftParts, verify: ForwardBatch, block_size: int, lookahead: int, pairs: torch.Tensor
    ) -> None:
        self.verify = verify
        self._parts = parts
        self._block_size = block_size
        self._lookahead = lookahead
        self._pairs = pairs
        rows = verify.attention.kv_lens.shape[0]
        self._width = 2 if parts.table is None else lookahead + 1
        more = ahead_fields(rows, lookahead - 1) | {
            "verdict_rows": Field((rows, lookahead + 1), initial=len(pairs) - 1),
            "start": Field((rows,), initial=-1),
            "last": Field((rows,)),
        }
        self._feed = StaticFeed(parts, FeedSize(rows, rows * self._width, self._width), more=more)
        self._tokens: list[torch.Tensor] = []
        self._graph: Graph | None = None

    def capture(self, graphs: GraphCapture, advance: Callable[[Advance], None]) -> None:
        """Record it."""

        @torch.inference_mode()
        def run() -> None:
            self._run(advance)

        self._graph = graphs.capture(run)

    def _run(self, advance: Callable[[Advance], None]) -> None:
        parts, pack = self._parts, self._feed.pack
        to = self._numbers()
        advance(to)
        output = parts.runner.run(self._feed.batch(Mode.DECODE, pack.device["last"]))

        def forward(step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ModelOutput:
            return parts.runner.run(ahead_batch(pack, step, tokens, hidden, max_len=parts.max_len))

        self._tokens[:] = [roll(parts, output, self._lookahead, forward).tokens]
        to.verify_ids[:, 1:].copy_(self._tokens[0])

    def _numbers(self) -> Advance:
        own, target = self._feed.pack.device, self.verify.attention
        size, rows = self._parts.runner.block_size, len(target.kv_lens)

        def each(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(rows, -1)

        return Advance(
            pairs=self._pairs,
            rows=own["verdict_rows"],
            start=own["start"],
            ids=each(own["ids"]),
            feed=Places(each(own["positions"]), each(own["slots"]), each(own["kv_lens"]), own["table"], size),
            last=own["last"],
            features=None if self._parts.table is None else each(own["feature_rows"]),
            steps=Places(
                own["ahead_positions"].T, own["ahead_slots"].T, own["ahead_kv_lens"].T, own["table"], size
            ),
            verify_ids=each(self.verify.input_ids),
            verify=Places(
                each(self.verify.positions), each(target.slot_mapping), each(target.kv_lens), target.block_table,
                self._block_size,
            ),
        )  # fmt: skip

    def replay(self, seqs: Rows[DraftSequence], verdict: Verdict) -> torch.Tensor:
        """Run it for these; the drafts [R, K] hold until the next replay."""
        assert self._graph is not None
        stage, count = self._feed.pack.next(), len(seqs)
        write_tables(stage, [seq.block_table for seq in seqs])
        arrays = stage.arrays
        write(arrays["query_start"], np.arange(count) * self._width, rest=count * self._width)
        write(arrays["ahead_start"], np.arange(count), rest=count)
        write(arrays["start"], np.array(verdict.start), rest=-1)
        depth, drafts = np.arange(self._lookahead + 1), np.array(verdict.num_drafts)[:, None]
        rows = np.array(verdict.first)[:, None] + depth
        arrays["verdict_rows"][:count] = np.where(depth <= drafts, rows, len(self._pairs) - 1)
        arrays["verdict_rows"][count:] = len(self._pairs) - 1
        self._feed.pack.send()
        self._pairs[: len(verdict.greedy)].copy_(verdict.greedy)
        self._graph.replay()
        return self._tokens[0][:count]


class CapturedNext:
    """Next rounds of `lookahead` drafts: a graph for each of the target's captured verifications of so many."""

    def __init__(
        self,
        parts: DraftParts,
        graphs: GraphCapture,
        verifications: StaticInputs,
        advance: Callable[[Advance], None],
        *,
        lookahead: int,
    ) -> None:
        """Captures; rounds of sizes that the device refuses wait for the verdict, and a line says so."""
        self.lookahead = lookahead
        most = max((batch.num_tokens for batch in verifications.batches), default=0)
        pairs = torch.tensor([_NOBODY] * (most + 1), dtype=torch.int64).to(parts.runner.device)
        refusals = Refusals()

        def captured(verify: ForwardBatch) -> _Next:
            one = _Next(parts, verify, verifications.block_size, lookahead, pairs)
            one.capture(graphs, advance)
            return one

        largest_first = reversed(verifications.batches)  # so that memory is shared
        held = [refusals.attempt(str(verify.attention.kv_lens.shape[0]), partial(captured, verify))
                for verify in largest_first]  # fmt: skip
        self._held = [one for one in held if one is not None]
        refusals.tell("next rounds of rows", "wait for the verdict")

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._held)

    def run(self, seqs: Rows[DraftSequence], verdict: Verdict, verify: ForwardBatch) -> torch.Tensor | None:
        """Draft after `verdict`, and write the inputs of `verify`, a staged batch; None where there is no graph."""
        for one in self._held:
            if one.verify.input_ids is verify.input_ids:
                return one.replay(seqs, verdict)
        return None
