"""Whole rounds of `ssd` for greedy rows: glue, guesses and branches in one or two captured graphs, and one copy.

What else might have followed each draft of a branch is kept with its sequence: when that branch comes true, the guesses
of the next round are known before its glue. Used by `paged.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.pack import Arriving
from ssd_ascend.speculation.base import BranchChoice, DraftSequence, Foresight, Kept
from ssd_ascend.speculation.drafters.captured_ahead import CapturedAhead, Early
from ssd_ascend.speculation.drafters.captured_forks import CapturedForks
from ssd_ascend.speculation.drafters.feed import Feed, Fork
from ssd_ascend.speculation.drafters.trunk import Trunk


class WholeRounds:
    """Runs the graphs of rounds over `trunk`, and reads what they give. max_backlog: see `PagedDrafter`."""

    def __init__(
        self,
        forks: CapturedForks,
        ahead: CapturedAhead | None,
        trunk: Trunk,
        blocks: BlockManager,
        max_backlog: int | None,
    ) -> None:
        self._forks = forks
        self._ahead = ahead
        self._trunk = trunk
        self._blocks = blocks
        self._max_backlog = max_backlog

    def foresee(
        self,
        seqs: Rows[DraftSequence],
        sent: Rows[Rows[int]],
        hidden: Rows[torch.Tensor | None],
        k: int,
        choice: BranchChoice,
        *,
        hurry: bool,
        meanwhile: Callable[[], None],
    ) -> Foresight | None:
        """See `ForeseeingDrafter`; all rows are greedy."""
        forks = self._forks
        if k != forks.lookahead or len(seqs) > forks.max_rows:
            return None
        live = self._trunk.ready(seqs, [len(drafts) for drafts in sent], self._max_backlog)
        self._trunk.catch_up([seqs[i] for i in live], forks.catch_up)
        feeds = [self._trunk.feed(seqs[i], sent[i], hidden[i], len(sent[i]) + 1) for i in live]
        if not live or not forks.holds(feeds):
            return None
        drafts, others = [sent[i] for i in live], [_take_others(seqs[i], sent[i]) for i in live]
        foreseen = self._run_ahead(feeds, drafts, others, choice, meanwhile) if hurry else None
        if foreseen is not None:
            return foreseen
        width = choice.width(forks.widths(len(live)), ahead=False)
        rounds = [Fork(feed, own, choice.picks(len(own), forks.num_ranks, width))
                  for feed, own in zip(feeds, drafts, strict=True)]  # fmt: skip
        return self._run_forks(rounds, width, meanwhile)

    def _run_forks(self, rounds: Rows[Fork], width: int, meanwhile: Callable[[], None]) -> Foresight | None:
        """Run the graphs, bring their verdict to the host; features stay, as copies that outlive the next round."""
        drafted = self._forks.run(rounds, self._blocks, width)
        if drafted is None:
            return None
        result, hidden = drafted
        arriving, k, kept = Arriving(result), self._forks.lookahead, self._ahead is not None
        index = [i * width + branch for i, fork in enumerate(rounds) for branch in range(len(fork.picks))]
        if hidden is not None:
            hidden = hidden[index] if len(index) < hidden.shape[0] else hidden.clone()
        self._computed(rounds)
        meanwhile()
        found, rows = _Found(), arriving.rows()
        for i, fork in enumerate(rounds):
            for row, (depth, _) in zip(rows[i * width :], fork.picks, strict=False):
                found.add(fork.feed.seq, depth, row[0], row[1 : k + 1], row[k + 1 :] if kept else None)
        return Foresight(found.outcomes, found.drafts, hidden)

    def _run_ahead(
        self,
        feeds: Rows[Feed],
        sent: Rows[Rows[int]],
        others: Rows[Rows[int] | None],
        choice: BranchChoice,
        meanwhile: Callable[[], None],
    ) -> Foresight | None:
        """The round whose guesses are known already, all but the last depth's; None where they are not, or no graph."""
        ahead, known = self._ahead, [own for own in others if own is not None]
        if ahead is None or len(known) < len(feeds) or not any(sent) or any(feed.num_committed != 1 for feed in feeds):
            return None
        widths = ahead.widths(len(feeds))
        if not widths:
            return None
        width = choice.width(widths, ahead=True)
        early = ahead.early(width)
        forks = [Fork(feed, drafts, []) for feed, drafts in zip(feeds, sent, strict=True)]
        guesses = [early.guesses(own) for own in known]
        result = ahead.run(forks, guesses, width, self._blocks)
        if result is None:
            return None
        arriving = Arriving(result)
        self._computed(forks)
        meanwhile()
        return self._read_ahead(forks, early, guesses, arriving.rows())

    def _read_ahead(
        self, forks: Rows[Fork], early: Early, guesses: Rows[Rows[int]], rows: Rows[list[int]]
    ) -> Foresight:
        """The verdict of its graph, a row a branch; drafts of the last depth are one fewer."""
        assert self._ahead is not None
        k, kept, found = self._ahead.lookahead, self._ahead.kept, _Found()
        width = len(rows) // len(forks)
        for i, (fork, tokens) in enumerate(zip(forks, guesses, strict=True)):
            own, seq, count = rows[i * width : (i + 1) * width], fork.feed.seq, len(fork.drafts)
            for row, depth, token in zip(own, early.depths, tokens, strict=False):
                if depth >= count:
                    break
                found.add(seq, depth, token, row[:k], row[k:])
            for row in own[len(tokens) :]:
                found.add(seq, count, row[0], row[1:k], row[k + kept :])
        return Foresight(found.outcomes, found.drafts, None)

    def _computed(self, forks: Rows[Fork]) -> None:
        """Entries of these, and of their drafts, are in the cache."""
        for fork in forks:
            self._trunk.mark(fork.feed.seq, fork.end)
            self._trunk.keep(fork.feed.seq, fork.drafts)


class _Found:
    """What a round gives for each outcome."""

    def __init__(self) -> None:
        self.outcomes: list[VerificationOutcome] = []
        self.drafts: list[list[int]] = []

    def add(self, seq: DraftSequence, depth: int, guess: int, drafts: list[int], others: list[int] | None) -> None:
        """A branch. others: see `Kept`; None where nobody asks."""
        self.outcomes.append(VerificationOutcome(seq.id, depth, guess))
        self.drafts.append(drafts)
        if others is not None:
            seq.others.append(Kept(seq.num_tokens + depth + 1, guess, drafts, others))


def _take_others(seq: DraftSequence, sent: Rows[int]) -> Rows[int] | None:
    """What might have followed in place of each draft under verification; nothing for a sequence without drafts, whose
    only depth is the last, None where they came from no branch. What was noted of all branches goes."""
    noted, seq.others = seq.others, []
    if not sent:
        return ()
    last, drafts = seq.token_ids[-1], list(sent)
    for num_tokens, guess, own, others in noted:
        if guess == last and num_tokens == seq.num_tokens and own == drafts:
            return others
    return None
