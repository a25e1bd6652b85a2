"""What a captured draft forward is fed: entries of a few sequences, and the features beside them, in static memory.

`captured_chain.py` and `captured_forks.py` build their graphs on it; `paged.py` says which entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from ssd_ascend.backends.base import StepwiseAttention
from ssd_ascend.core.attention import AttentionMetadata
from ssd_ascend.core.batch import ForwardBatch, Mode
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.model_runner import Chooser, ModelRunner
from ssd_ascend.runtime.pack import Field, Pack, Stage, pinned
from ssd_ascend.runtime.static import row_fields, static_batch, write_rows
from ssd_ascend.speculation.base import DraftSequence


class Feed(NamedTuple):
    """Entries of one sequence to run: the committed ones not yet computed, then `tail` drafts with their features."""

    seq: DraftSequence
    row: Row
    num_tail: int
    tail_hidden: torch.Tensor | None

    @property
    def num_committed(self) -> int:
        """Entries before the drafts."""
        return len(self.row.tokens) - self.num_tail


class Fork(NamedTuple):
    """One sequence under verification: its glue, its drafts, and the guesses as (depth, rank)."""

    feed: Feed
    drafts: Rows[int]
    picks: list[tuple[int, int]]

    @property
    def base(self) -> int:
        """Entries after glue."""
        return self.feed.row.start + len(self.feed.row.tokens)

    @property
    def end(self) -> int:
        """Entries of committed tokens."""
        return self.base - len(self.drafts)


class GlueOutput(NamedTuple):
    """What glue leaves for the branches: the tokens [G, C] that may follow each row, best first, and features."""

    best: torch.Tensor
    hidden: torch.Tensor | None


class FeatureTable(NamedTuple):
    """How entries come by their features. `combine`: target features [T, width] -> [T, hidden_size] in `dtype`.

    store: the target's features by slot, where they are at hand; else each sequence brings its own.
    """

    width: int
    hidden_size: int
    dtype: torch.dtype
    combine: Callable[[torch.Tensor], torch.Tensor]
    store: torch.Tensor | None


class DraftParts(NamedTuple):
    """What captured drafting is made of. `to_target`: see `Drafter.to_target`; max_len: positions a row may reach;
    num_tokens: the draft's vocabulary."""

    runner: ModelRunner
    table: FeatureTable | None
    choose: Chooser
    to_target: torch.Tensor | None
    max_len: int
    num_tokens: int

    def token(self, logits: torch.Tensor) -> torch.Tensor:
        """The arg-max of each row, as a token of the target."""
        token = self.choose(logits)[0]
        return token if self.to_target is None else self.to_target.index_select(0, token)


class FeedSize(NamedTuple):
    """Up to `rows` sequences of up to `per_row` entries, `tokens` of them in all."""

    rows: int
    tokens: int
    per_row: int

    @staticmethod
    def of(feeds: Rows[Feed]) -> FeedSize:
        """What these take."""
        lengths = [len(feed.row.tokens) for feed in feeds]
        return FeedSize(len(lengths), sum(lengths), max(lengths))

    def holds(self, wanted: FeedSize) -> bool:
        """Whether that fits."""
        return all(own >= need for own, need in zip(self, wanted, strict=True))


def feed_sizes(max_rows: int, per_row: int) -> list[FeedSize]:
    """Sizes worth a graph, the largest first: rows double, and most rows have far fewer entries than they could."""
    rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < max_rows] + [max_rows]
    sizes = [
        FeedSize(count, tokens, per_row)
        for count in rows
        for tokens in sorted({min(count * per_row, n) for n in (max(16, count), 3 * count, count * per_row)})
        if tokens >= count
    ]
    return sorted(sizes, key=lambda size: -size.tokens)


class StaticFeed:
    """The inputs of one captured draft forward. `tails`: the most drafts in it, 0 where there are none."""

    def __init__(
        self, parts: DraftParts, size: FeedSize, *, tails: int = 0, more: Mapping[str, Field] | None = None
    ) -> None:
        self.size = size
        self._parts = parts
        device = parts.runner.device
        fields = row_fields(size.rows, size.tokens, parts.max_len, parts.runner.block_size) | dict(more or {})
        if parts.table is not None:
            fields |= {"feature_rows": Field((size.tokens,)), "tail_rows": Field((size.tokens,), initial=-1)}
            shape = (size.tokens, parts.table.width)
            self._features = torch.zeros(shape, dtype=parts.table.dtype, device=device)
            self._tails = torch.zeros((tails, parts.table.hidden_size), dtype=parts.table.dtype, device=device)
        self.pack = Pack(fields, device)

    def batch(self, mode: Mode, logits_rows: torch.Tensor) -> ForwardBatch:
        """The captured batch; what it launches belongs into the graph."""
        batch = static_batch(self.pack, mode, per_row=self.size.per_row, max_len=self._parts.max_len)
        return ForwardBatch(mode, batch.input_ids, batch.positions, batch.attention, self._hidden(), logits_rows)

    def _hidden(self) -> torch.Tensor | None:
        """[tokens, hidden_size]: target features combined, or the drafter's own where an entry is a draft's."""
        table = self._parts.table
        if table is None:
            return None
        source = self._features if table.store is None else table.store
        hidden = table.combine(source.index_select(0, self.pack.device["feature_rows"]).to(table.dtype))
        if not self._tails.shape[0]:
            return hidden
        rows = self.pack.device["tail_rows"]
        own = self._tails.index_select(0, rows.clamp(min=0))
        return torch.where((rows >= 0).unsqueeze(1), own, hidden)

    def fill(self, feeds: Rows[Feed]) -> Stage:
        """Write everything but what `more` named; the caller adds that and sends the pack."""
        stage = self.pack.next()
        lengths = [len(feed.row.tokens) for feed in feeds]
        write_rows(stage, [feed.row for feed in feeds], lengths, self._parts.runner.block_size)
        if self._parts.table is not None:
            self._write_features(stage, feeds, in_store=self._parts.table.store is not None)
        return stage

    def replan(self, feeds: Rows[Feed]) -> None:
        """Say the lengths of these, where they are the host's: they are the first forward of the graph."""
        attention, device = self._parts.runner.attention, self.pack.device
        if not isinstance(attention, StepwiseAttention):
            return
        meta = AttentionMetadata(
            [len(feed.row.tokens) for feed in feeds],
            [feed.row.start + len(feed.row.tokens) for feed in feeds],
            device["query_start"],
            device["kv_lens"],
            device["table"],
            device["slots"],
        )
        attention.replan_step(meta, self.size.tokens, 0)

    def _write_features(self, stage: Stage, feeds: Rows[Feed], *, in_store: bool) -> None:
        """Which feature goes with which entry; those that are not in the store are brought into static memory."""
        rows, tail_rows = stage.arrays["feature_rows"], stage.arrays["tail_rows"]
        tail_rows.fill(-1)
        held: list[torch.Tensor] = []
        tails: list[torch.Tensor] = []
        at = num_held = num_tails = 0
        for feed in feeds:
            seq, count = feed.seq, feed.num_committed
            first = feed.row.start - seq.features_start
            if in_store:
                assert seq.feature_slots is not None
                rows[at : at + count] = seq.feature_slots[first : first + count]
            else:
                assert seq.features is not None
                rows[at : at + count] = np.arange(num_held, num_held + count)
                held.append(seq.features[first : first + count])
            at, num_held = at + count, num_held + count
            if feed.tail_hidden is not None:
                tail_rows[at : at + feed.num_tail] = np.arange(num_tails, num_tails + feed.num_tail)
                tails.append(feed.tail_hidden)
            at, num_tails = at + feed.num_tail, num_tails + feed.num_tail
        if held:
            self._features[:num_held].copy_(pinned(torch.cat(held), self._features.device), non_blocking=True)
        if tails:
            self._tails[:num_tails].copy_(pinned(torch.cat(tails), self._tails.device), non_blocking=True)
