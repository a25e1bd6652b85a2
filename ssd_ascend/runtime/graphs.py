"""Captured forwards by bucket: a step whose rows fit a bucket replays one graph over static buffers. Role-blind.

`inputs.build_batch` writes such a step straight into its bucket's buffers (one copy to the device), and
`ModelRunner.forward` replays it. A padded row has no queries and no keys, a padded token the slot -1 and no row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from ssd_ascend.backends.base import AttentionBackend, Backend, Graph
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.inputs import Row

_log = get_logger(__name__)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_STAGES = 2
"""Host buffers a bucket: one is filled while the other's copy may still be under way."""

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


def make_buckets(max_rows: int, lookahead: int) -> list[Bucket]:
    """Decode buckets, and verify buckets where there are drafts; the largest first, so that memory is shared."""
    rows = [*(size for size in _ROWS if size < max_rows), max_rows]
    kinds = [(Mode.VERIFY, lookahead + 1)] if lookahead else []
    buckets = [Bucket(mode, size, per_row) for mode, per_row in [*kinds, (Mode.DECODE, 1)] for size in rows]
    return sorted(buckets, key=lambda bucket: -bucket.tokens)


class _Buffers:
    """One bucket's static inputs: a packed device buffer, views of it as a batch, and the host's side of it."""

    def __init__(self, bucket: Bucket, block_size: int, max_len: int, device: torch.device) -> None:
        self.bucket = bucket
        tokens, rows, width = bucket.tokens, bucket.rows, -(-max_len // block_size)
        shorts = (rows + 1) + rows + rows * width
        self._words = torch.zeros(3 * tokens + (shorts + 1) // 2, dtype=torch.int64, device=device)
        pinned = device.type != "cpu"
        hosts = [torch.zeros(self._words.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(_STAGES)]
        self._hosts = [(host, _Views(host.numpy(), tokens, rows, width, block_size)) for host in hosts]
        self._sent = [torch.Event(device=device) if pinned else None for _ in range(_STAGES)]
        self._turn = 0
        short = self._words[3 * tokens :].view(torch.int32)
        self.batch = ForwardBatch(
            mode=bucket.mode,
            input_ids=self._words[:tokens],
            positions=self._words[tokens : 2 * tokens],
            attention=AttentionMetadata(
                query_lens_host=[bucket.per_row] * rows,
                kv_lens_host=[max_len] * rows,
                query_start=short[: rows + 1],
                kv_lens=short[rows + 1 : 2 * rows + 1],
                block_table=short[2 * rows + 1 : 2 * rows + 1 + rows * width].view(rows, width),
                slot_mapping=self._words[2 * tokens : 3 * tokens],
            ),
        )
        self._words[2 * tokens : 3 * tokens].fill_(-1)

    def fill(self, mode: Mode, rows: Rows[Row], lengths: list[int]) -> ForwardBatch:
        """Send a batch; the returned one has its host lengths and this bucket's (larger) device tensors."""
        self._turn = (self._turn + 1) % _STAGES
        staged, views = self._hosts[self._turn]
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        views.write(rows, lengths)
        self._words.copy_(staged, non_blocking=True)
        if event is not None:
            event.record()
        device = self.batch.attention
        meta = AttentionMetadata(
            query_lens_host=lengths,
            kv_lens_host=[row.start + length for row, length in zip(rows, lengths, strict=True)],
            query_start=device.query_start,
            kv_lens=device.kv_lens,
            block_table=device.block_table,
            slot_mapping=device.slot_mapping,
        )
        return ForwardBatch(mode, self.batch.input_ids, self.batch.positions, meta)


class _Views:
    """A host buffer, cut as the device's, and what its block table holds already."""

    def __init__(self, words: np.ndarray, tokens: int, rows: int, width: int, block_size: int) -> None:
        short = words[3 * tokens :].view(np.int32)
        self.ids, self.positions, self.slots = words[: 3 * tokens].reshape(3, tokens)
        self.query_start, self.kv_lens = short[: rows + 1], short[rows + 1 : 2 * rows + 1]
        self.table = short[2 * rows + 1 : 2 * rows + 1 + rows * width].reshape(rows, width)
        self._written: list[list[int]] = [[] for _ in range(rows)]
        self._block_size = block_size
        self._ramp = np.arange(max(tokens, rows) + 1)

    def write(self, rows: Rows[Row], lengths: list[int]) -> None:
        """Fill in a batch. Stale numbers stay only where nothing reads them: ids and positions of padding."""
        count, total = len(rows), sum(lengths)
        for i, row in enumerate(rows):
            if row.block_table != self._written[i]:
                self._written[i] = list(row.block_table)
                self.table[i, : len(row.block_table)] = row.block_table
        starts = np.array([row.start for row in rows])
        per_row, token = lengths[0], self._ramp[:total]
        first: np.ndarray
        if lengths.count(per_row) == count:
            owner, first = token // per_row, self._ramp[:count] * per_row
        else:
            first = np.cumsum(lengths) - lengths
            owner = np.repeat(self._ramp[:count], lengths)
        place = starts[owner] + token - first[owner]
        self.ids[:total] = [token for row in rows for token in row.tokens]
        self.positions[:total] = place
        block, inside = np.divmod(place, self._block_size)
        self.slots[:total] = self.table[owner, block].astype(np.int64) * self._block_size + inside
        self.slots[total:] = -1
        self.query_start[:count] = first
        self.query_start[count:] = total
        self.kv_lens[:count] = starts + lengths
        self.kv_lens[count:] = 0


class _Captured(NamedTuple):
    buffers: _Buffers
    graph: Graph
    outputs: list[ModelOutput]
    """The one that the captured forward made."""


class GraphRunner:
    """The captured forwards of one model. Outputs of a replay hold until the next replay of the same bucket."""

    def __init__(self, forward: Forward, attention: AttentionBackend) -> None:
        self._forward = forward
        self._attention = attention
        self._captured: list[_Captured] = []
        self._staged: tuple[ForwardBatch, _Captured] | None = None

    @property
    def buckets(self) -> list[Bucket]:
        """Those that replay, smallest first."""
        return [captured.buffers.bucket for captured in self._captured]

    def capture(
        self, backend: Backend, device: torch.device, buckets: Iterable[Bucket], *, block_size: int, max_len: int
    ) -> None:
        """Capture what the device can; sizes it cannot run eagerly from then on, and one line says so."""
        graphs = backend.graphs(device)
        if graphs is None:
            return
        began, free = time.monotonic(), backend.memory(device).free
        failed: list[Bucket] = []
        for bucket in buckets:
            buffers = _Buffers(bucket, block_size, max_len, device)
            outputs: list[ModelOutput] = []

            @torch.inference_mode()
            def step(batch: ForwardBatch = buffers.batch, outputs: list[ModelOutput] = outputs) -> None:
                outputs[:] = [self._forward(batch)]

            try:
                graph = graphs.capture(step)
            except RuntimeError as error:
                _log.warning("no graph for %d rows of %d tokens (%s): they run eagerly", *bucket[1:], _brief(error))
                failed.append(bucket)
                continue
            self._captured.insert(0, _Captured(buffers, graph, outputs))
        self._captured.sort(key=lambda captured: captured.buffers.bucket.tokens)
        backend.synchronize(device)
        _log.info(
            "captured %d graphs in %.1f s, %.2f GB; %d sizes run eagerly",
            len(self._captured), time.monotonic() - began, (free - backend.memory(device).free) / 1e9, len(failed),
        )  # fmt: skip

    def stage(self, mode: Mode, rows: Rows[Row]) -> ForwardBatch | None:
        """Send a batch into the smallest bucket that holds it; None when none does."""
        lengths = [len(row.tokens) for row in rows]
        longest, blocks = max(lengths), max(len(row.block_table) for row in rows)
        for captured in self._captured:
            bucket, table = captured.buffers.bucket, captured.buffers.batch.attention.block_table
            if bucket.mode is not mode or bucket.rows < len(rows) or bucket.per_row < longest:
                continue
            if blocks > table.shape[1] or any(row.num_logits != n for row, n in zip(rows, lengths, strict=True)):
                return None
            batch = captured.buffers.fill(mode, rows, lengths)
            self._staged = (batch, captured)
            return batch
        return None

    def captured(self, batch: ForwardBatch) -> Graph | None:
        """The graph that a freshly staged batch will replay."""
        return self._staged[1].graph if self._staged is not None and self._staged[0] is batch else None

    def replay(self, batch: ForwardBatch) -> ModelOutput | None:
        """The output of a batch that `stage` made, without its padding; None for any other batch."""
        if self._staged is None or self._staged[0] is not batch:
            return None
        captured, self._staged = self._staged[1], None
        self._attention.replan(batch.attention, captured.buffers.bucket.tokens)
        captured.graph.replay()
        tokens, output = sum(batch.attention.query_lens_host), captured.outputs[0]
        return ModelOutput(
            output.logits[:tokens],
            None if output.hidden is None else output.hidden[:tokens],
            None if output.features is None else output.features[:tokens],
        )


def _brief(error: RuntimeError) -> str:
    """The first line of an error that may hold a page."""
    return str(error).partition("\n")[0]
