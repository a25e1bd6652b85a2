"""Whole rounds of `ssd` for greedy rows: glue, guesses and branches in one or two captured graphs, and one copy.

What else might have followed each draft of a branch is kept with its sequence: when that branch comes true, the guesses
of the next round are known before its glue. Used by `paged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.runtime.pack import Arriving
from ssd_ascend.speculation.base import Branch, BranchChoice, Chain, DraftSequence, Foresight
from ssd_ascend.speculation.drafters.captured_ahead import CapturedAhead, Guess
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
        drafts, others = [sent[i] for i in live], _take_others(seqs, sent)
        foreseen = self._run_ahead(feeds, drafts, [others[i] for i in live], choice) if hurry else None
        if foreseen is not None:
            return foreseen
        width = choice.width(forks.widths(len(live)), ahead=False)
        rounds = [Fork(feed, own, choice.picks(len(own), forks.num_ranks, width))
                  for feed, own in zip(feeds, drafts, strict=True)]  # fmt: skip
        return self._run_forks(rounds, width)

    def _run_forks(self, rounds: Rows[Fork], width: int) -> Foresight | None:
        """Run the graphs, bring their verdict to the host; features stay, as copies that outlive the next round."""
        drafted = self._forks.run(rounds, self._blocks, width)
        if drafted is None:
            return None
        result, hidden = drafted
        arriving, k = Arriving(result), self._forks.lookahead
        index: list[int] = []
        branches: list[Branch] = []
        for i, fork in enumerate(rounds):
            self._trunk.mark(fork.feed.seq, fork.end)
            self._trunk.keep(fork.feed.seq, fork.drafts)
            index += range(i * width, i * width + len(fork.picks))
            branches += [Branch(fork.feed.seq, depth, i * (k + 1) + depth) for depth, _ in fork.picks]
        kept = None if hidden is None else hidden.clone()
        if kept is not None and len(index) < kept.shape[0]:
            kept = kept[index]
        values = arriving.rows()
        rows = [values[i] for i in index]
        if self._ahead is not None:
            for branch, row in zip(branches, rows, strict=True):
                _keep_others(branch, row[: k + 1], row[k + 1 :], self._ahead.kept)
        tokens = torch.tensor([row[1 : k + 1] for row in rows], dtype=torch.int64)
        chain = Chain(tokens, [k] * len(rows), None, [False] * len(rows), kept)
        return Foresight(branches, [row[0] for row in rows], chain)

    def _run_ahead(
        self, feeds: Rows[Feed], sent: Rows[Rows[int]], others: Rows[Rows[Rows[int]] | None], choice: BranchChoice
    ) -> Foresight | None:
        """The round whose guesses are known already, all but the last depth's; None where they are not, or no graph."""
        ahead = self._ahead
        known = _known_of_all(sent, others)
        if ahead is None or known is None or any(feed.num_committed != 1 for feed in feeds):
            return None
        widths = ahead.widths(len(feeds))
        if not widths:
            return None
        forks = [Fork(feed, drafts, []) for feed, drafts in zip(feeds, sent, strict=True)]
        width = choice.width(widths, ahead=True)
        guesses = [ahead.guesses(each, width) for each in known]
        result = ahead.run(forks, guesses, self._blocks)
        return None if result is None else self._read_ahead(ahead, forks, guesses, Arriving(result).rows())

    def _read_ahead(
        self, ahead: CapturedAhead, forks: Rows[Fork], guesses: Rows[Rows[Guess]], rows: Rows[list[int]]
    ) -> Foresight:
        """The verdict of its graph, a row a guess; drafts of the last depth are one fewer."""
        branches: list[Branch] = []
        tokens, drafts = [], []
        for i, (fork, own) in enumerate(zip(forks, guesses, strict=True)):
            self._trunk.mark(fork.feed.seq, fork.end)
            self._trunk.keep(fork.feed.seq, fork.drafts)
            for guess in own:
                found = ahead.read(guess, rows[i * len(own) + guess.place])
                if found is None:
                    continue
                branches.append(Branch(fork.feed.seq, guess.depth, 0))
                _keep_others(branches[-1], [found.token, *found.drafts], found.others, ahead.kept)
                tokens.append(found.token)
                drafts.append(found.drafts)
        lengths = [len(each) for each in drafts]
        padded = [each + [0] * (ahead.lookahead - len(each)) for each in drafts]
        chain = Chain(torch.tensor(padded, dtype=torch.int64), lengths, None, [False] * len(drafts), None)
        return Foresight(branches, tokens, chain)


def _keep_others(branch: Branch, tokens: Rows[int], others: Rows[int], kept: int) -> None:
    """Note what might have followed in place of each draft of a branch, `kept` tokens each. tokens: its guess, its
    drafts."""
    branch.seq.others[branch.seq.num_tokens + branch.depth + 1, *tokens] = [
        others[at : at + kept] for at in range(0, len(others), kept)
    ]


def _take_others(seqs: Rows[DraftSequence], sent: Rows[Rows[int]]) -> list[Rows[Rows[int]] | None]:
    """What might have followed in place of each draft under verification, None where they came from no branch. What was
    noted of the other branches goes."""
    taken = [
        seq.others.get((seq.num_tokens, seq.token_ids[-1], *drafts)) for seq, drafts in zip(seqs, sent, strict=True)
    ]
    for seq in seqs:
        seq.others = {}
    return taken


def _known_of_all(sent: Rows[Rows[int]], others: Rows[Rows[Rows[int]] | None]) -> list[Rows[Rows[int]]] | None:
    """What might have followed, sequence by sequence; None unless that is known of all, and some have drafts at all. A
    sequence without drafts has no depth but the last."""
    own = [[] if not drafts else each for each, drafts in zip(others, sent, strict=True)]
    known = [each for each in own if each is not None]
    return known if len(known) == len(own) and any(sent) else None
