"""Drafting with a model over a paged cache of its own; what an entry of that cache is, is the drafter's business.

`drafters/model.py` and `drafters/eagle3.py` say that in a few lines each; the algorithm is here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import torch

from ssd_ascend.core.batch import ForwardBatch, Mode, ModelOutput
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.runtime.model_runner import ModelRunner
from ssd_ascend.runtime.pack import Arriving
from ssd_ascend.runtime.sampler import RowContext
from ssd_ascend.speculation.base import Branch, BranchChoice, Chain, DraftSequence, Foresight, Glue, Verdict, spread
from ssd_ascend.speculation.branches import BranchLayout, RowsLayout, TreeMaskLayout
from ssd_ascend.speculation.draft_sampler import DraftSampler
from ssd_ascend.speculation.drafters.capture import NOTHING, Captured
from ssd_ascend.speculation.drafters.tails import Tails
from ssd_ascend.speculation.drafters.trunk import EntrySource, Trunk
from ssd_ascend.speculation.drafters.whole_rounds import WholeRounds


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
        captured: Captured = NOTHING,
    ) -> None:
        """`tree_mask` picks the branch layout, `captured` does whole rounds of greedy rows.

        max_backlog: prompt tokens digested per round, in `glue`; a sequence gets drafts once its prompt is digested.
        None: prompts are digested when somebody asks, whatever that takes.
        """
        self.runner = runner
        self.wants_features = entries.wants_features
        self.to_target = sampler.to_target
        self._blocks = blocks
        self._keeps_drafted = entries.keeps_drafted
        self._trunk = Trunk(runner, blocks, entries, max_positions=max_positions, max_batched_tokens=max_batched_tokens)
        self._sampler = sampler
        self._max_positions = max_positions
        self._max_backlog = max_backlog
        self._tree_mask = tree_mask
        self._captured = captured
        self._rounds = None
        if captured.forks is not None:
            self._rounds = WholeRounds(captured.forks, captured.ahead, self._trunk, blocks, max_backlog)

    @property
    def whole_chain(self) -> int:
        """See `ForeseeingDrafter`."""
        return 0 if self._captured.chains is None else self._captured.chains.lookahead

    # -- drafting after the last token ---------------------------------------------------------------------------

    def chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain:
        """Draft `lookahead` tokens after the last one of every sequence: one catch-up forward, then one per token."""
        backlog = None if self._max_backlog is None else 0  # who waits for an answer does not wait for a prompt
        live = self._trunk.ready(seqs, [lookahead] * len(seqs), backlog) if lookahead > 0 else []
        if not live:
            return self._no_chain(len(seqs), lookahead)
        chosen = [seqs[i] for i in live]
        chain = self._captured_chain(chosen, lookahead) or self._stepwise_chain(chosen, lookahead)
        if self._keeps_drafted and lookahead > 1:
            arriving = Arriving(chain.tokens[:, : lookahead - 1])
            for i, seq in enumerate(chosen):
                seq.drafted = partial(arriving.row, i)
        return spread(chain, live, len(seqs))

    def _captured_chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain | None:
        """In one graph; None where there is none for these."""
        chains = self._captured.chains
        if chains is None or lookahead != chains.lookahead or not all(map(self._sampler.is_arg_max, seqs)):
            return None
        self._trunk.catch_up(seqs, chains.catch_up)
        rolled = chains.run([self._trunk.feed(seq, (), None, 1) for seq in seqs])
        if rolled is None:
            return None
        for seq in seqs:
            self._trunk.mark(seq, self._trunk.end(seq))
        # good until the next chain: drafts and features are fed to the target, or to glue, before that
        return Chain(rolled.tokens, [lookahead] * len(seqs), None, [False] * len(seqs), rolled.hidden)

    @property
    def follows(self) -> bool:
        """See `FollowingDrafter`."""
        return bool(self._captured.following)

    def follow(self, seqs: Rows[DraftSequence], verdict: Verdict, verify: ForwardBatch) -> torch.Tensor | None:
        """See `FollowingDrafter`; every sequence may gain a whole speculation, and be drafted for behind that."""
        following = self._captured.following
        if following is None or not all(map(self._sampler.is_arg_max, seqs)):
            return None
        reach = 2 * following.lookahead + 1
        for seq in seqs:
            end = self._trunk.end(seq)
            if seq.num_entries < end or not self._trunk.reserve(seq, end + reach):
                return None
        return following.run(seqs, verdict, verify)

    def caught_up(self, seq: DraftSequence) -> None:
        """See `FollowingDrafter`."""
        seq.drafted = None
        self._trunk.mark(seq, self._trunk.end(seq))

    def kept(self, seq: DraftSequence, drafts: Rows[int]) -> None:
        """See `FollowingDrafter`; a chain does not feed its last draft."""
        if self._captured.following is not None:
            self._trunk.keep(seq, drafts[: self._captured.following.lookahead - 1])

    def _stepwise_chain(self, seqs: Rows[DraftSequence], lookahead: int) -> Chain:
        output = self._trunk.run([self._trunk.feed(seq, (), None, 1) for seq in seqs], Mode.DECODE)
        ends = [self._trunk.end(seq) for seq in seqs]

        def forward(step: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> ModelOutput:
            rows = [Row((0,), end + step, seq.block_table, 1) for seq, end in zip(seqs, ends, strict=True)]
            return self._trunk.forward(Mode.DECODE, rows, hidden, input_ids=tokens)

        return self._roll(output, seqs, [0] * len(seqs), lookahead, forward, Tails(seqs))

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
            contexts = self._contexts(seqs, offsets, step, tails)
            drawn = self._sampler.draw(output.logits, contexts, output.greedy)
            tokens.append(drawn.tokens)
            tails.grow(drawn.tokens)
            if drawn.law is not None:
                laws.append(drawn.law)
            if output.hidden is not None and self.wants_features:
                hidden.append(output.hidden.clone())  # the next replay writes there again
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
        live = self._trunk.ready(seqs, [len(drafts) for drafts in sent], self._max_backlog)
        num_rows = [0] * len(seqs)
        for i in live:
            num_rows[i] = len(sent[i]) + 1
        if not live:
            return Glue(torch.empty(0, 0), None, num_rows)
        feeds = [self._trunk.feed(seqs[i], sent[i], hidden[i], len(sent[i]) + 1) for i in live]
        output = self._trunk.run(feeds, Mode.GLUE)
        contexts = []
        for i in live:
            drafts = torch.tensor(sent[i], dtype=torch.int64, device=self.runner.device)
            contexts += [self._sampler.context(seqs[i], j, drafts[:j], sent[i][:j]) for j in range(len(sent[i]) + 1)]
            self._trunk.keep(seqs[i], sent[i])
        hidden_after = None if output.hidden is None else output.hidden.clone()  # the branches' replays write there
        return Glue(self._sampler.scores(output.logits, contexts), hidden_after, num_rows)

    def foresee(
        self,
        seqs: Rows[DraftSequence],
        sent: Rows[Rows[int]],
        hidden: Rows[torch.Tensor | None],
        k: int,
        choice: BranchChoice,
        *,
        hurry: bool = False,
        meanwhile: Callable[[], None],
    ) -> Foresight | None:
        """`glue`, the guesses of `choice`, and `branch`: one or two graphs, one copy."""
        if self._rounds is None or not all(map(self._sampler.is_arg_max, seqs)):
            return None
        return self._rounds.foresee(seqs, sent, hidden, k, choice, hurry=hurry, meanwhile=meanwhile)

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
        ends = [self._trunk.end(branch.seq) + branch.depth for branch in branches]
        bases = [self._trunk.end(branch.seq) + len(drafts) for branch, drafts in zip(branches, sent, strict=True)]
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
        return RowsLayout(branches, ends, k, self._blocks, self.runner.kv, self.runner.device, self.runner.graphs)

    def release(self, seq: DraftSequence) -> None:
        """Give back the blocks and counts of a sequence."""
        self._blocks.free(seq.block_table)
        seq.num_entries, seq.drafted = 0, None
        self._sampler.release([seq.key])

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _no_chain(self, num_rows: int, k: int) -> Chain:
        tokens = torch.zeros((num_rows, k), dtype=torch.int64, device=self.runner.device)
        return Chain(tokens, [0] * num_rows, None, [False] * num_rows, None)
