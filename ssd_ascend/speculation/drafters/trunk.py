"""The committed entries of a drafter's cache: which are computed, which are missing, and the room they take.

`paged.py` drafts on top of it. What an entry is, is the drafter's business (`EntrySource`).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.speculation.base import DraftSequence
from ssd_ascend.speculation.drafters.feed import Feed

_BACKLOG = 32
"""A sequence with more uncomputed entries than this is brought up to date in forwards of its own (a prompt)."""


class EntrySource(Protocol):
    """What one entry of the drafter's cache is made of.

    shift: entry i holds token i + shift. keeps_drafted: entries written for drafts stay right once the drafts are
    accepted (false where they were conditioned on the drafter's own features, to be replaced by the target's).
    """

    shift: int
    wants_features: bool
    keeps_drafted: bool

    def hidden(self, seq: DraftSequence, start: int, end: int) -> torch.Tensor | None:
        """What is fed beside the tokens of committed entries [start, end): [end - start, H], or None."""
        ...


class Trunk:
    """What every sequence has in the cache of `runner`. Its blocks are `blocks`', which branches borrow from."""

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        entries: EntrySource,
        *,
        max_positions: int,
        max_batched_tokens: int,
    ) -> None:
        self._runner = runner
        self._blocks = blocks
        self._entries = entries
        self._max_positions = max_positions
        self._max_batched_tokens = max_batched_tokens

    def end(self, seq: DraftSequence) -> int:
        """Entries that the committed tokens make."""
        return seq.num_tokens - self._entries.shift

    def _hold(self, seq: DraftSequence, num_drafts: int) -> bool:
        """Room for all committed entries and `num_drafts` more; False without room, or without the features."""
        end = self.end(seq)
        if end < 1 or not self.reserve(seq, end + num_drafts):
            return False
        self._settle(seq)
        return not self._entries.wants_features or seq.features_end >= end

    def reserve(self, seq: DraftSequence, num_entries: int) -> bool:
        """Room for so many entries in all; False, and nothing taken, where there is none."""
        if num_entries > self._max_positions or not self._blocks.can_grow(seq.block_table, num_entries):
            return False
        self._blocks.grow(seq.block_table, num_entries)
        return True

    def ready(self, seqs: Rows[DraftSequence], num_drafts: Rows[int], max_backlog: int | None) -> list[int]:
        """The sequences that drafts can be had for now: with room for them, and no long stretch left to compute."""
        held = [i for i, seq in enumerate(seqs) if self._hold(seq, num_drafts[i])]
        self._digest_backlogs([seqs[i] for i in held], max_backlog)
        return [i for i in held if self.end(seqs[i]) - seqs[i].num_entries <= _BACKLOG]

    def _settle(self, seq: DraftSequence) -> None:
        """Count the entries of accepted drafts as committed, but for the last one, whose logits are needed again."""
        drafted, seq.drafted = seq.drafted, None
        if drafted is None:
            return
        for token in drafted():
            entry = seq.num_entries
            if entry + 1 >= self.end(seq) or seq.token_ids[entry + self._entries.shift] != token:
                return
            seq.num_entries += 1

    def keep(self, seq: DraftSequence, drafts: Rows[int]) -> None:
        """Note that entries of these drafts were computed, where they stay right."""
        if self._entries.keeps_drafted:
            seq.drafted = lambda: drafts

    def feed(self, seq: DraftSequence, tail: Rows[int], tail_hidden: torch.Tensor | None, num_logits: int) -> Feed:
        """Every committed entry not yet computed, and `tail`; logits of the last num_logits entries."""
        end = self.end(seq)
        start = min(seq.num_entries, end - 1)  # the last one always runs: the logits after it are what is wanted
        row = Row([*self._tokens(seq, start, end), *tail], start, seq.block_table, num_logits)
        return Feed(seq, row, len(tail), tail_hidden)

    def run(self, feeds: Rows[Feed], mode: Mode) -> ModelOutput:
        """Run the feeds launch by launch, or by a graph of one forward."""
        hidden = []
        if self._entries.wants_features:
            for feed in feeds:
                start = feed.row.start
                hidden += [self._committed_hidden(feed.seq, start, start + feed.num_committed), feed.tail_hidden]
        fed = [part for part in hidden if part is not None and part.shape[0]]
        output = self.forward(mode, [feed.row for feed in feeds], torch.cat(fed) if fed else None)
        for feed in feeds:
            self.mark(feed.seq, self.end(feed.seq))
        return output

    def catch_up(self, seqs: Rows[DraftSequence], most: int) -> None:
        """Compute what sequences have beyond `most` uncomputed entries: a worker that fell behind gets back into its
        graphs, which hold few, instead of falling behind further without them."""
        self._digest_backlogs(seqs, None, keep=most)

    def _digest_backlogs(self, seqs: Rows[DraftSequence], most: int | None, keep: int = _BACKLOG) -> None:
        """Compute long stretches of committed entries (prompts), up to `most`, by `max_batched_tokens` a forward.

        A stretch of `keep` is left alone."""
        left = sum(self.end(seq) for seq in seqs) if most is None else most
        while True:
            budget, rows, hidden, reached = min(left, self._max_batched_tokens), [], [], []
            for seq in seqs:
                start, end = seq.num_entries, min(self.end(seq) - 1, seq.num_entries + budget)
                if self.end(seq) - start <= keep or end <= start:
                    continue
                rows.append(Row(self._tokens(seq, start, end), start, seq.block_table, 0))
                hidden.append(self._committed_hidden(seq, start, end))
                reached.append((seq, end))
                budget -= end - start
                left -= end - start
            if not rows:
                return
            fed = [part for part in hidden if part is not None]
            self.forward(Mode.PREFILL, rows, torch.cat(fed) if fed else None)
            for seq, end in reached:
                self.mark(seq, end)

    def _tokens(self, seq: DraftSequence, start: int, end: int) -> list[int]:
        return seq.token_ids[start + self._entries.shift : end + self._entries.shift]

    def _committed_hidden(self, seq: DraftSequence, start: int, end: int) -> torch.Tensor | None:
        return self._entries.hidden(seq, start, end) if end > start else None

    def mark(self, seq: DraftSequence, end: int) -> None:
        """Entries below `end` are computed; their features are dropped, but for the last one's, which may run again."""
        seq.num_entries = end
        seq.drop_features(end - 1)

    def forward(
        self, mode: Mode, rows: Rows[Row], hidden: torch.Tensor | None, input_ids: torch.Tensor | None = None
    ) -> ModelOutput:
        """One forward of these rows, by a graph where one holds them. input_ids: instead of the rows' own tokens."""
        device = self._runner.device
        batch = build_batch(
            mode,
            rows,
            block_size=self._blocks.block_size,
            device=device,
            hidden_states=hidden,
            input_ids=input_ids,
            staging=self._runner.graphs,
        )
        return self._runner.forward(batch)
