"""Drafting with a model over a paged cache of its own; what an entry of that cache is, is the drafter's business.

`drafters/model.py` and `drafters/eagle3.py` say that in a few lines each; the algorithm is here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import torch

from ssd_ascend.core.batch import Mode, ModelOutput
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.inputs import Row, build_batch
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.runtime.sampler import RowContext
from ssd_ascend.speculation.base import Branch, Chain, DraftSequence, Glue, spread
from ssd_ascend.speculation.branches import BranchLayout, RowsLayout, TreeMaskLayout
from ssd_ascend.speculation.draft_sampler import DraftSampler
from ssd_ascend.speculation.drafters.tails import Tails

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


class _Feed(NamedTuple):
    """Entries of one sequence to run: the committed ones not yet computed, then `tail` drafts."""

    seq: DraftSequence
    tail: Rows[int]
    tail_hidden: torch.Tensor | None
    num_logits: int


class PagedDrafter:
    """A `Drafter` over a `ModelRunner`.

    Sequences it cannot hold get no drafts; nothing ever fails for lack of memory.
    """

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        entries: EntrySource,
        sampler: DraftSampler,
        *,
        max_positions: int,
        max_batched_tokens: int,
        max_backlog: int | None,
        tree_mask: bool,
    ) -> None:
        """`tree_mask` picks the branch layout.

        max_backlog: prompt tokens digested per round, in `glue`; a sequence gets drafts once its prompt is digested.
        None: prompts are digested when somebody asks, whatever that takes.
        """
        self.runner = runner
        self.wants_features = entries.wants_features
        self.to_target = sampler.to_target
        self._blocks = blocks
        self._entries = entries
        self._sampler = sampler
        self._max_positions = max_positions
        self._max_batched_tokens = max_batched_tokens
        self._max_backlog = max_backlog
        self._tree_mask = tree_mask

    # -- drafting after the last token ---------------------------------------------------------------------------

    def chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain:
        """Draft `lookahead` tokens after the last one of every sequence: one catch-up forward, then one per token."""
        backlog = None if self._max_backlog is None else 0  # who waits for an answer does not wait for a prompt
        live = self._ready(seqs, [lookahead] * len(seqs), backlog) if lookahead > 0 else []
        if not live:
            return self._no_chain(len(seqs), lookahead)
        chosen = [seqs[i] for i in live]
        output = self._catch_up([_Feed(seq, (), None, 1) for seq in chosen], Mode.DECODE)
        ends = [self._end(seq) for seq in chosen]

        def forward(step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ModelOutput:
            rows = [Row((0,), end + step, seq.block_table, 1) for seq, end in zip(chosen, ends, strict=True)]
            return self._forward(Mode.DECODE, rows, hidden, input_ids=tokens)

        chain = self._roll(output, chosen, [0] * len(chosen), lookahead, forward, Tails(chosen))
        if self._entries.keeps_drafted:
            for i, seq in enumerate(chosen):
                seq.drafted = chain.tokens[i, : lookahead - 1]
        return spread(chain, live, len(seqs))

    def _roll(
        self,
        output: ModelOutput,
        seqs: Rows[DraftSequence],
        offsets: Rows[int],
        k: int,
        forward: Callable[[int, torch.Tensor, torch.Tensor | None], ModelOutput],
        tails: Tails,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Chain:
        """Draw a token from `output`, feed it, draw the next, k times. Row i's first token is offsets[i] places after
        the next one of its sequence, past the hypothetical tokens in `tails`."""
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        hidden: list[torch.Tensor] = []
        for step in range(k):
            if step and should_stop():
                break
            if step:
                output = forward(step - 1, tokens[-1], output.hidden if self.wants_features else None)
            drawn = self._sampler.draw(output.logits, self._contexts(seqs, offsets, step, tails))
            tokens.append(drawn.tokens)
            tails.grow(drawn.tokens)
            if drawn.law is not None:
                laws.append(drawn.law)
            if output.hidden is not None and self.wants_features:
                hidden.append(output.hidden)
        return Chain(
            tokens=torch.stack(tokens, dim=1),
            num_tokens=[len(tokens)] * len(seqs),
            law=torch.stack(laws, dim=1) if laws else None,
            has_law=[self._sampler.has_law(seq) for seq in seqs],
            hidden=torch.stack(hidden, dim=1) if hidden else None,
        )

    def _contexts(self, seqs: Rows[DraftSequence], offsets: Rows[int], step: int, tails: Tails) -> list[RowContext]:
        """The law's context of each row at this step."""
        return [
            self._sampler.context(seq, offset + step, tails.on_device(i), tails.on_host(i))
            for i, (seq, offset) in enumerate(zip(seqs, offsets, strict=True))
        ]

    # -- over a speculation under verification ---------------------------------------------------------------------

    def glue(self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], hidden: Rows[torch.Tensor | None]) -> Glue:
        """One forward over what is committed and `sent`; a sequence's rows are after 0, 1, ..., len(sent) drafts."""
        live = self._ready(seqs, [len(drafts) for drafts in sent], self._max_backlog)
        num_rows = [0] * len(seqs)
        for i in live:
            num_rows[i] = len(sent[i]) + 1
        if not live:
            return Glue(torch.empty(0, 0), None, num_rows)
        output = self._catch_up([_Feed(seqs[i], sent[i], hidden[i], len(sent[i]) + 1) for i in live], Mode.GLUE)
        contexts = []
        for i in live:
            drafts = torch.tensor(sent[i], dtype=torch.int64, device=self.runner.device)
            contexts += [self._sampler.context(seqs[i], j, drafts[:j], sent[i][:j]) for j in range(len(sent[i]) + 1)]
            if self._entries.keeps_drafted:
                seqs[i].drafted = drafts
        return Glue(self._sampler.scores(output.logits, contexts), output.hidden, num_rows)

    def branch(
        self,
        branches: Rows[Branch],
        guesses: torch.Tensor,
        glue: Glue,
        sent: Rows[Rows[int]],
        k: int,
        should_stop: Callable[[], bool],
    ) -> Chain:
        """Feed every guess, then draft k tokens after it. Entries are scratch: the trunk keeps nothing of them."""
        ends = [self._end(branch.seq) + branch.depth for branch in branches]
        bases = [self._end(branch.seq) + len(drafts) for branch, drafts in zip(branches, sent, strict=True)]
        layout = self._layout(branches, ends, bases, k)
        if layout is None:
            return self._no_chain(len(branches), k)
        try:
            hidden = None
            if self.wants_features and glue.hidden is not None:
                picked = torch.tensor([branch.glue_row for branch in branches], device=glue.hidden.device)
                hidden = glue.hidden.index_select(0, picked)
            output = self.runner.forward(layout.batch(0, guesses, hidden))
            seqs = [branch.seq for branch in branches]
            tails = Tails(seqs, [drafts[: b.depth] for b, drafts in zip(branches, sent, strict=True)])
            tails.grow(guesses)
            return self._roll(
                output,
                seqs,
                [branch.depth + 1 for branch in branches],
                k,
                lambda step, tokens, hidden: self.runner.forward(layout.batch(step + 1, tokens, hidden)),
                tails,
                should_stop,
            )
        finally:
            layout.close()

    def _layout(self, branches: Rows[Branch], ends: Rows[int], bases: Rows[int], k: int) -> BranchLayout | None:
        """The branch layout, or None when scratch memory or positions do not suffice."""
        if max(ends) + k > self._max_positions:
            return None
        size = self._blocks.block_size
        if self._tree_mask:
            width: dict[int, int] = {}
            for branch in branches:
                width[branch.seq.id] = width.get(branch.seq.id, 0) + 1
            need = {b.seq.id: self._blocks.blocks_for(base + width[b.seq.id] * k) - len(b.seq.block_table)
                    for b, base in zip(branches, bases, strict=True)}  # fmt: skip
            if sum(max(0, blocks) for blocks in need.values()) > self._blocks.num_free:
                return None
            return TreeMaskLayout(branches, ends, bases, k, self._blocks, self.runner.device)
        if sum(RowsLayout.blocks_needed(end, k, size) for end in ends) > self._blocks.num_free:
            return None
        return RowsLayout(branches, ends, k, self._blocks, self.runner.kv, self.runner.device)

    def release(self, seq: DraftSequence) -> None:
        """Give back the blocks and counts of a sequence."""
        self._blocks.free(seq.block_table)
        seq.num_entries, seq.drafted = 0, None
        self._sampler.release([seq.id])

    # -- committed entries -----------------------------------------------------------------------------------------

    def _end(self, seq: DraftSequence) -> int:
        """Entries that the committed tokens make."""
        return seq.num_tokens - self._entries.shift

    def _reserve(self, seq: DraftSequence, num_drafts: int) -> bool:
        """Room for all committed entries and `num_drafts` more; False without room, or without the features."""
        end = self._end(seq)
        if (
            end < 1
            or end + num_drafts > self._max_positions
            or not self._blocks.can_grow(seq.block_table, end + num_drafts)
        ):
            return False
        self._blocks.grow(seq.block_table, end + num_drafts)
        self._settle(seq)
        known = 0 if seq.features is None else seq.features_start + seq.features.shape[0]
        return not self.wants_features or known >= end

    def _ready(self, seqs: Rows[DraftSequence], num_drafts: Rows[int], max_backlog: int | None) -> list[int]:
        """The sequences that drafts can be had for now: with room for them, and no long stretch left to compute."""
        held = [i for i, seq in enumerate(seqs) if self._reserve(seq, num_drafts[i])]
        self._digest_backlogs([seqs[i] for i in held], max_backlog)
        return [i for i in held if self._end(seqs[i]) - seqs[i].num_entries <= _BACKLOG]

    def _settle(self, seq: DraftSequence) -> None:
        """Count the entries of accepted drafts as committed, but for the last one, whose logits are needed again."""
        drafted, seq.drafted = seq.drafted, None
        if drafted is None:
            return
        for token in drafted.tolist():
            entry = seq.num_entries
            if entry + 1 >= self._end(seq) or seq.token_ids[entry + self._entries.shift] != token:
                return
            seq.num_entries += 1

    def _catch_up(self, feeds: Rows[_Feed], mode: Mode) -> ModelOutput:
        """Run every committed entry not yet computed, and the tails; logits of each row's last num_logits entries."""
        rows, hidden = [], []
        for seq, tail, tail_hidden, num_logits in feeds:
            end = self._end(seq)
            start = min(seq.num_entries, end - 1)  # the last one always runs: the logits after it are what is wanted
            rows.append(Row([*self._tokens(seq, start, end), *tail], start, seq.block_table, num_logits))
            if self.wants_features:
                hidden += [self._committed_hidden(seq, start, end), tail_hidden]
        fed = [part for part in hidden if part is not None and part.shape[0]]
        output = self._forward(mode, rows, torch.cat(fed) if fed else None)
        for feed in feeds:
            self._mark(feed.seq, self._end(feed.seq))
        return output

    def _digest_backlogs(self, seqs: Rows[DraftSequence], most: int | None) -> None:
        """Compute long stretches of committed entries (prompts), up to `most`, by `max_batched_tokens` a forward."""
        left = sum(self._end(seq) for seq in seqs) if most is None else most
        while True:
            budget, rows, hidden, reached = min(left, self._max_batched_tokens), [], [], []
            for seq in seqs:
                start, end = seq.num_entries, min(self._end(seq) - 1, seq.num_entries + budget)
                if self._end(seq) - start <= _BACKLOG or end <= start:
                    continue
                rows.append(Row(self._tokens(seq, start, end), start, seq.block_table, 0))
                hidden.append(self._committed_hidden(seq, start, end))
                reached.append((seq, end))
                budget -= end - start
                left -= end - start
            if not rows:
                return
            fed = [part for part in hidden if part is not None]
            self._forward(Mode.PREFILL, rows, torch.cat(fed) if fed else None)
            for seq, end in reached:
                self._mark(seq, end)

    def _tokens(self, seq: DraftSequence, start: int, end: int) -> list[int]:
        return seq.token_ids[start + self._entries.shift : end + self._entries.shift]

    def _committed_hidden(self, seq: DraftSequence, start: int, end: int) -> torch.Tensor | None:
        return self._entries.hidden(seq, start, end) if end > start else None

    def _mark(self, seq: DraftSequence, end: int) -> None:
        """Entries below `end` are computed; their features are dropped, but for the last one's, which may run again."""
        seq.num_entries = end
        digested = end - 1 - seq.features_start
        if seq.features is not None and digested > 0:
            seq.features = seq.features[digested:]
            seq.features_start += digested

    def _forward(
        self, mode: Mode, rows: Rows[Row], hidden: torch.Tensor | None, input_ids: torch.Tensor | None = None
    ) -> ModelOutput:
        device = self.runner.device
        batch = build_batch(
            mode, rows, block_size=self._blocks.block_size, device=device, hidden_states=hidden, input_ids=input_ids
        )
        return self.runner.forward(batch)

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _no_chain(self, num_rows: int, k: int) -> Chain:
        tokens = torch.zeros((num_rows, k), dtype=torch.int64, device=self.runner.device)
        return Chain(tokens, [0] * num_rows, None, [False] * num_rows, None)
