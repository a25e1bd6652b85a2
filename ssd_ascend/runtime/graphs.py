"""Captured forwards by bucket: a step whose rows fit a bucket replays one graph over static buffers. Role-blind.

`inputs.build_batch` writes such a step straight into its bucket's buffers (one copy to the device), and
`ModelRunner.forward` replays it. A padded row has no queries and no keys, a padded token the slot -1 and no row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ssd_ascend.backends.base import AttentionBackend, Backend, Graph
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.inputs import HostBatch

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

    def __init__(self, bucket: Bucket, width: int, max_len: int, device: torch.device) -> None:
        self.bucket = bucket
        tokens, rows = bucket.tokens, bucket.rows
        shorts = (rows + 1) + rows + rows * width
        self._words = torch.zeros(3 * tokens + (shorts + 1) // 2, dtype=torch.int64, device=device)
        pinned = device.type != "cpu"
        hosts = [torch.zeros(self._words.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(_STAGES)]
        self._hosts = [(host, _Views.of(host.numpy(), tokens, rows, width)) for host in hosts]
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

    def fill(self, host: HostBatch) -> ForwardBatch:
        """Send a batch; the returned one has its host lengths and this bucket's (larger) device tensors."""
        self._turn = (self._turn + 1) % _STAGES
        staged, views = self._hosts[self._turn]
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        views.write(host)
        self._words.copy_(staged, non_blocking=True)
        if event is not None:
            event.record()
        meta = replace(
            self.batch.attention, query_lens_host=host.query_lens.tolist(), kv_lens_host=host.kv_lens.tolist()
        )
        return replace(self.batch, mode=host.mode, attention=meta)


@dataclass(frozen=True, slots=True)
class _Views:
    """A host buffer, piece by piece."""

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    kv_lens: np.ndarray
    table: np.ndarray

    @staticmethod
    def of(words: np.ndarray, tokens: int, rows: int, width: int) -> _Views:
        """Cut `words` as `_Buffers` does."""
        short = words[3 * tokens :].view(np.int32)
        table = short[2 * rows + 1 : 2 * rows + 1 + rows * width].reshape(rows, width)
        ids, positions, slots = words[: 3 * tokens].reshape(3, tokens)
        return _Views(ids, positions, slots, short[: rows + 1], short[rows + 1 : 2 * rows + 1], table)

    def write(self, host: HostBatch) -> None:
        """Fill in a batch. Stale numbers stay only where nothing reads them: ids and positions of padding."""
        tokens, rows = len(host.token_ids), len(host.query_lens)
        self.input_ids[:tokens] = host.token_ids
        self.positions[:tokens] = host.positions
        self.slots[:tokens] = host.slots
        self.slots[tokens:] = -1
        self.query_start[1 : rows + 1] = host.query_ends
        self.query_start[rows + 1 :] = tokens
        self.kv_lens[:rows] = host.kv_lens
        self.kv_lens[rows:] = 0
        self.table[:rows, : host.table.shape[1]] = host.table


class _Captured(NamedTuple):
    buffers: _Buffers
    graph: Graph
    output: ModelOutput


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
            buffers = _Buffers(bucket, -(-max_len // block_size), max_len, device)
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
            self._captured.insert(0, _Captured(buffers, graph, outputs[0]))
        self._captured.sort(key=lambda captured: captured.buffers.bucket.tokens)
        backend.synchronize(device)
        _log.info(
            "captured %d graphs in %.1f s, %.2f GB; %d sizes run eagerly",
            len(self._captured), time.monotonic() - began, (free - backend.memory(device).free) / 1e9, len(failed),
        )  # fmt: skip

    def stage(self, host: HostBatch) -> ForwardBatch | None:
        """Send a batch into the smallest bucket that holds it; None when none does."""
        rows, longest = len(host.query_lens), int(host.query_lens.max(initial=0))
        for captured in self._captured:
            bucket = captured.buffers.bucket
            if bucket.mode is host.mode and bucket.rows >= rows and bucket.per_row >= longest:
                if host.table.shape[1] > captured.buffers.batch.attention.block_table.shape[1]:
                    return None
                batch = captured.buffers.fill(host)
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
        tokens, output = sum(batch.attention.query_lens_host), captured.output
        return ModelOutput(
            output.logits[:tokens],
            None if output.hidden is None else output.hidden[:tokens],
            None if output.features is None else output.features[:tokens],
        )


def _brief(error: RuntimeError) -> str:
    """The first line of an error that may hold a page."""
    return str(error).partition("\n")[0]
