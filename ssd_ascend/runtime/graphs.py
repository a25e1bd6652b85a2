"""Captured forwards by bucket: a step whose rows fit a bucket replays one graph over static buffers. Role-blind.

`inputs.build_batch` writes such a step straight into its bucket's buffers (one copy to the device), and
`ModelRunner.forward` replays it. A padded row has no queries and no keys, a padded token the slot -1 and no row.
Where a padded token costs as much as any other, each number of tokens has its own graph, captured when it turns up.
Of prompts, one that comes alone has graphs of some sizes: launched one by one, its kernels would take longer to queue
than to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from functools import partial
from typing import NamedTuple

import torch

from ssd_ascend.backends.base import AttentionBackend, Backend, CompilingBackend, Graph, GraphCapture
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.pack import Field, Pack, Stage, index_on
from ssd_ascend.runtime.refusals import Refusals
from ssd_ascend.runtime.static import (
    Reach,
    ReachedRows,
    row_fields,
    slots_between,
    static_batch,
    write_rows,
    write_tables,
)

_log = get_logger(__name__)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_PROMPTS = (16, 32, 64, 128, 256, 512)
"""Tokens of a prompt, or of a part of one. Each graph holds those that fill more than half of it: devices may go about
longer ones in other ways, and do so from a power of two on."""
_SHORT = 64
"""Prompts of up to so many tokens may want the workspace of drafts that are verified, see `graph_bytes`."""
_MOST_EXACT = 32
"""Tokens of the largest graph without padding: beyond, the time is spent in kernels and not between them."""

Forward = Callable[[ForwardBatch], ModelOutput]


class Bucket(NamedTuple):
    """A graph's size: up to `rows` rows of up to `per_row` tokens each."""

    mode: Mode
    rows: int
    per_row: int

    @property
    def tokens(self) -> int:
        """Tokens of the captured forward."""
        return self.rows * self.per_row

    @property
    def is_prompt(self) -> bool:
        """Whether it holds a prompt, of which one token at most has a row of logits."""
        return self.mode is Mode.PREFILL

    def holds(self, mode: Mode, rows: int, longest: int) -> bool:
        """Whether such a batch may run here. All but prompts may run among any other kind."""
        if self.is_prompt:
            return mode is Mode.PREFILL and rows == 1 and self.per_row // 2 < longest <= self.per_row
        return mode is not Mode.PREFILL and self.rows >= rows and self.per_row >= longest


def make_buckets(max_rows: int, lookahead: int, longest_prompt: int = 0) -> list[Bucket]:
    """Decode buckets, verify buckets where there are drafts, and those of prompts of up to `longest_prompt` tokens; the
    largest first, so that memory is shared."""
    rows = [*(size for size in _ROWS if size < max_rows), max_rows]
    kinds = [(Mode.VERIFY, lookahead + 1)] if lookahead else []
    buckets = [Bucket(mode, size, per_row) for mode, per_row in [*kinds, (Mode.DECODE, 1)] for size in rows]
    most = max(bucket.tokens for bucket in buckets)
    sizes = [size for size in _PROMPTS if size <= longest_prompt and (size <= most or size > _SHORT)]
    buckets += [Bucket(Mode.PREFILL, 1, size) for size in sizes]
    return sorted(buckets, key=lambda bucket: -bucket.tokens)


def captured_tokens(backend: Backend, max_rows: int, lookahead: int) -> tuple[int, ...]:
    """Tokens of each step that `GraphRunner` would capture beforehand."""
    able = backend.capabilities.graphs and backend.capabilities.padded_graphs
    return tuple(bucket.tokens for bucket in make_buckets(max_rows, lookahead)) if able else ()


class _Buffers:
    """One bucket's static inputs: numbers that a step sends in one copy, and features where the model reads them."""

    def __init__(
        self, bucket: Bucket, block_size: int, max_len: int, device: torch.device, features: torch.Tensor | None
    ) -> None:
        self.bucket = bucket
        self._block_size = block_size
        wanted = {"wanted": Field((bucket.rows,))} if bucket.is_prompt else {}
        self._pack = Pack(row_fields(bucket.rows, bucket.tokens, max_len, block_size) | wanted, device)
        self.reached = ReachedRows(bucket.rows, bucket.tokens)
        batch = static_batch(self._pack, bucket.mode, per_row=bucket.per_row, max_len=max_len)
        hidden = None if features is None else features.new_zeros(bucket.tokens, features.shape[-1])
        last = self._pack.device.get("wanted")
        self.batch = ForwardBatch(batch.mode, batch.input_ids, batch.positions, batch.attention, hidden, last)

    def fill(self, mode: Mode, rows: Rows[Row], lengths: list[int]) -> ForwardBatch:
        """Send a batch; the returned one has its host lengths and this bucket's (larger) device tensors."""
        stage = self._pack.next()
        write_rows(stage, rows, lengths, self._block_size)
        if self.bucket.is_prompt:
            stage.arrays["wanted"][:] = lengths[0] - 1
        self._pack.send()
        return self._filled(mode, lengths, [row.start + length for row, length in zip(rows, lengths, strict=True)])

    def claim(self, mode: Mode, tables: Rows[Rows[int]]) -> tuple[Stage, ForwardBatch]:
        """The host buffer that the next batch will be sent from, with these block tables; and that batch, whose host
        lengths are to come."""
        stage = self._pack.next()
        write_tables(stage, tables)
        return stage, self._filled(mode, [], [])

    def send_claimed(self, *, aside: bool) -> None:
        """Send what was written there; aside: to where nobody reads it, and once more when it counts."""
        if aside:
            self._pack.send_aside()
        else:
            self._pack.send()

    def _filled(self, mode: Mode, lengths: list[int], ends: list[int]) -> ForwardBatch:
        device = self.batch.attention
        meta = AttentionMetadata(
            query_lens_host=lengths,
            kv_lens_host=ends,
            query_start=device.query_start,
            kv_lens=device.kv_lens,
            block_table=device.block_table,
            slot_mapping=device.slot_mapping,
        )
        batch = self.batch
        return ForwardBatch(mode, batch.input_ids, batch.positions, meta, batch.hidden_states, batch.logits_rows)


class Rehearsal:
    """Stands in for a device's `GraphCapture`, and its graphs: runs what is to be captured, records nothing."""

    def capture(self, fn: Callable[[], None]) -> Graph:
        """Run it."""
        fn()
        return self

    def replay(self) -> None:
        """There is nothing to replay."""
        raise AssertionError("a rehearsal was replayed")


class _Captured(NamedTuple):
    buffers: _Buffers
    graph: Graph
    outputs: list[ModelOutput]
    """The one that the captured forward made."""


class _Staged(NamedTuple):
    """A batch in its bucket's buffers, how many rows of logits it has there, and which of them it wants (None: all)."""

    batch: ForwardBatch
    captured: _Captured
    num_logits: int
    wanted: list[int] | None


class Prepared(NamedTuple):
    """A captured verification that is to come: its buffer is claimed, block tables lie there, slots are counted."""

    captured: _Captured
    reaches: list[Reach]
    stage: Stage
    batch: ForwardBatch

    def send(self, rows: Rows[Row], *, aside: bool = False) -> ForwardBatch | None:
        """These rows, all of whose logits are wanted, as a batch; None where one does not lie where it was expected.
        aside: only for practice; the device gets them to where nothing is read, and the real ones are still to come."""
        buffers, lengths = self.captured.buffers, self.batch.attention
        if not buffers.reached.write(self.stage, rows, self.reaches, lengths.query_lens_host, lengths.kv_lens_host):
            return None
        buffers.send_claimed(aside=aside)
        return self.batch


class StaticInputs(NamedTuple):
    """What captured forwards read, smallest first: numbers written there between `stage` and `replay` are the ones."""

    batches: list[ForwardBatch]
    block_size: int


class GraphRunner:
    """The captured forwards of one model. What a replay gives holds until the next one: graphs share their memory."""

    def __init__(self, forward: Forward, attention: AttentionBackend, features: torch.Tensor | None = None) -> None:
        """`features`: any tensor of the width and dtype of what the model reads beside its tokens, None if nothing."""
        self._forward = forward
        self._attention = attention
        self._features = features
        self._captured: list[_Captured] = []
        self._capture_exactly: Callable[[Bucket], _Captured] | None = None
        self._full = False
        self._staged: _Staged | None = None
        self._block_size = 0
        self.max_len = 0
        """Positions that a row of a captured step may reach."""

    @property
    def buckets(self) -> list[Bucket]:
        """Those that replay, smallest first."""
        return [captured.buffers.bucket for captured in self._captured]

    def inputs(self, per_row: int) -> StaticInputs:
        """Those of graphs of `per_row` tokens a row."""
        buckets = (captured.buffers for captured in self._captured)
        own = [each.batch for each in buckets if each.bucket.per_row == per_row and not each.bucket.is_prompt]
        return StaticInputs(own, self._block_size)

    def capture(
        self, backend: Backend, device: torch.device, buckets: Iterable[Bucket], *, block_size: int, max_len: int
    ) -> None:
        """Capture what the device can; a line says which sizes it cannot, and what that costs."""
        graphs = backend.graphs(device)
        if graphs is None:
            return
        self._block_size, self.max_len = block_size, max_len
        one = partial(self._capture_one, device, block_size, max_len, graphs)
        if not backend.capabilities.padded_graphs:
            self._capture_exactly = one
            return
        buckets, began = list(buckets), time.monotonic()
        if isinstance(backend, CompilingBackend):
            with backend.compiling():
                for bucket in buckets:
                    self._capture_one(device, block_size, max_len, Rehearsal(), bucket)
        free = backend.memory(device).free
        refusals = Refusals()
        captured = [refusals.attempt(f"{bucket.rows}x{bucket.per_row}", partial(one, bucket)) for bucket in buckets]
        self._captured = sorted(filter(None, captured), key=lambda one: one.buffers.bucket.tokens)
        backend.synchronize(device)
        refusals.tell("steps of rows x tokens", "run in a larger graph, or eagerly")
        _log.info(
            "captured %d graphs in %.1f s, %.2f GB; %d sizes run eagerly",
            len(self._captured), time.monotonic() - began, (free - backend.memory(device).free) / 1e9,
            captured.count(None),
        )  # fmt: skip

    def _capture_one(
        self, device: torch.device, block_size: int, max_len: int, graphs: GraphCapture, bucket: Bucket
    ) -> _Captured:
        buffers = _Buffers(bucket, block_size, max_len, device, self._features)
        outputs: list[ModelOutput] = []

        @torch.inference_mode()
        def step() -> None:
            outputs[:] = [self._forward(buffers.batch)]

        return _Captured(buffers, graphs.capture(step), outputs)

    def _holding(self, mode: Mode, rows: int, longest: int, tokens: int) -> _Captured | None:
        """The smallest graph that holds a batch; without padding the one of just as many tokens, captured if need be.

        There a row costs nothing and a token does, so the graph of T tokens has T rows: most of them stay empty.
        """
        if self._capture_exactly is None:
            return next((c for c in self._captured if c.buffers.bucket.holds(mode, rows, longest)), None)
        if mode is Mode.PREFILL:
            return None
        found = next((c for c in self._captured if c.buffers.bucket.tokens == tokens), None)
        if found is None and tokens <= _MOST_EXACT and not self._full:
            refusals = Refusals()
            found = refusals.attempt(str(tokens), partial(self._capture_exactly, Bucket(Mode.DECODE, tokens, 1)))
            refusals.tell("steps of tokens", "run eagerly, as do all that have no graph by now")
            self._full = found is None
            self._captured += [found] if found is not None else []
        return found

    def stage(
        self,
        mode: Mode,
        rows: Rows[Row],
        hidden_states: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> ForwardBatch | None:
        """Send a batch into the smallest bucket that holds it; None when none does."""
        lengths = [len(row.tokens) for row in rows]
        longest, blocks = max(lengths), max(len(row.block_table) for row in rows)
        if (hidden_states is None) != (self._features is None):
            return None
        if mode is Mode.PREFILL and rows[0].num_logits > 1:
            return None
        captured = self._holding(mode, len(rows), longest, sum(lengths))
        if captured is None or blocks > captured.buffers.batch.attention.block_table.shape[1]:
            return None
        batch = captured.buffers.fill(mode, rows, lengths)
        if input_ids is not None:
            batch.input_ids[: input_ids.shape[0]].copy_(input_ids)
        if hidden_states is not None and batch.hidden_states is not None:
            batch.hidden_states[: hidden_states.shape[0]].copy_(hidden_states)
        if captured.buffers.bucket.is_prompt:
            self._staged = _Staged(batch, captured, rows[0].num_logits, None)
        else:
            self._staged = _Staged(batch, captured, sum(lengths), _wanted(rows, lengths))
        return batch

    def prepare(self, tables: Rows[Rows[int]], starts: Rows[int], *, longest: int, span: int) -> Prepared | None:
        """Do now what `stage` need not do once tokens are known: a verification follows whose row i has `longest`
        tokens at most, somewhere within `span` positions from starts[i] on. None where there is no graph for it."""
        if self._capture_exactly is not None or self._features is not None:
            return None
        captured = self._holding(Mode.VERIFY, len(tables), longest, longest * len(tables))
        if captured is None or max(map(len, tables)) > captured.buffers.batch.attention.block_table.shape[1]:
            return None
        size = self._block_size
        reaches = [
            Reach(at, slots_between(table, at, min(at + span, size * len(table)), size))
            for table, at in zip(tables, starts, strict=True)
        ]
        return Prepared(captured, reaches, *captured.buffers.claim(Mode.VERIFY, tables))

    def stage_prepared(self, prepared: Prepared, rows: Rows[Row]) -> ForwardBatch | None:
        """`stage` for those rows, when no other batch came between; None as `Prepared.send`."""
        batch = prepared.send(rows)
        if batch is not None:
            self._staged = _Staged(batch, prepared.captured, sum(batch.attention.query_lens_host), None)
        return batch

    def captured(self, batch: ForwardBatch) -> Graph | None:
        """The graph that a freshly staged batch will replay."""
        return self._staged.captured.graph if self._staged is not None and self._staged.batch is batch else None

    def replay(self, batch: ForwardBatch) -> ModelOutput | None:
        """The output of a batch that `stage` made, without its padding; None for any other batch."""
        if self._staged is None or self._staged.batch is not batch:
            return None
        (_, captured, num_logits, wanted), self._staged = self._staged, None
        self._attention.replan(batch.attention, captured.buffers.bucket.tokens)
        captured.graph.replay()
        tokens, output = sum(batch.attention.query_lens_host), captured.outputs[0]
        index = None
        if wanted is not None:
            index = index_on(wanted, output.logits.device)

        def asked_for(rows: torch.Tensor) -> torch.Tensor:
            return rows[:num_logits] if index is None else rows.index_select(0, index)

        return ModelOutput(
            logits=asked_for(output.logits),
            hidden=None if output.hidden is None else asked_for(output.hidden),
            features=None if output.features is None else output.features[:tokens],
            greedy=None if output.greedy is None else asked_for(output.greedy),
        )


def _wanted(rows: Rows[Row], lengths: list[int]) -> list[int] | None:
    """The packed rows whose logits are asked for; None when all are."""
    if all(row.num_logits == n for row, n in zip(rows, lengths, strict=True)):
        return None
    wanted: list[int] = []
    end = 0
    for row, length in zip(rows, lengths, strict=True):
        end += length
        wanted += range(end - row.num_logits, end)
    return wanted
