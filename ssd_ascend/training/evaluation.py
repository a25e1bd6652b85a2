"""How well a head drafts, read off tables of what it would have guessed: chains, self-conditioning depth, branches.

Drafts stand only as long as they are the text, so a chain that is fed the true text guesses exactly what a free one
would have guessed wherever it matters. At temperature 1 the same holds by coupling: given that the target's text has
token t, it was an accepted draft with probability min(1, q(t) / p(t)).

An outcome (j, t*) of a speculation that started at u is the text itself: j accepted, then t*. Its cached branch is
steps j + 2, ... of the same chain u; a fresh draft from the same outcome is steps 1, ... of the chain u + j + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of n + 1 tokens, the first of which needs no draft.

    `stands` bool [S, n]: whether step s (row s - 1) of the chain that is fed token i (column i) would have given token
    i + s, False past the end; `ended`: with an end token, rather than cut off; `foreseen` bool [S, n]: the text's token
    was among the next-best guesses after the first (what a speculation cache forks from)."""

    stands: Array
    foreseen: Array
    ended: bool


@dataclass(slots=True)
class Tally:
    """Rounds of one kind, summed up."""

    rounds: int = 0
    tokens: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, lookahead: int, accepted: int, emitted: int) -> None:
        """One round. Nothing is emitted after the answer's last token, so that round has no recovery token."""
        self.rounds += 1
        self.tokens += emitted
        for table, upto in ((self.offered, min(accepted + 1, lookahead)), (self.accepted, accepted)):
            table += [0] * (lookahead - len(table))
            for i in range(upto):
                table[i] += 1

    @property
    def tokens_per_round(self) -> float:
        """The acceptance length, recovery token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def by_position(self) -> list[float]:
        """How often the draft of each position stands, if all before it did."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]


def leading(stands: Array, most: int) -> int:
    """How many of the first `most` stand without a break."""
    wrong = np.flatnonzero(~stands[:most])
    return int(wrong[0]) if len(wrong) else min(most, len(stands))


def rounds(answer: Answer, lookahead: int) -> Iterable[tuple[int, int]]:
    """(start, accepted) of every round that drafts this answer from its beginning to its end."""
    at, last = 0, answer.stands.shape[1]
    while at < last:
        accepted = leading(answer.stands[:, at], min(lookahead, last - at))
        yield at, accepted
        at += accepted + 1


def chains(answers: Iterable[Answer], lookahead: int) -> Tally:
    """Every round of these answers, drafted afresh each time."""
    tally = Tally()
    for answer in answers:
        for start, accepted in rounds(answer, lookahead):
            tally.add(lookahead, accepted, min(accepted + 1, answer.stands.shape[1] - start))
    return tally


def by_depth(answers: Sequence[Answer]) -> list[float]:
    """Share of right guesses at each step of self-conditioning, whatever came before: [S]."""
    depth = answers[0].stands.shape[0] if answers else 0
    shares = []
    for step in range(depth):
        # the last `step` chains have no token left to guess at this step
        hits = np.concatenate([answer.stands[step, : max(0, answer.stands.shape[1] - step)] for answer in answers])
        shares.append(float(hits.mean()) if len(hits) else 0.0)
    return shares


@dataclass(frozen=True, slots=True)
class BranchRow:
    """Outcomes with `depth` accepted drafts: how many, how many tokens a round the branch gives, and a fresh draft."""

    depth: int
    outcomes: int
    branch: float
    fresh: float

    @property
    def ratio(self) -> float:
        """Branch to fresh."""
        return self.branch / self.fresh if self.fresh else 0.0


def branches(answers: Iterable[Answer], lookahead: int, *, only_foreseen: bool) -> list[BranchRow]:
    """Branches against fresh drafts by depth, and all together in the last row (depth -1).

    `only_foreseen`: outcomes that a cache would have held, by its next-best guesses.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for answer in answers:
        last = answer.stands.shape[1]
        for start, accepted in rounds(answer, lookahead):
            after = start + accepted + 1
            if after >= last or (only_foreseen and not answer.foreseen[accepted, start]):
                continue
            most = min(lookahead, last - after)
            branch = leading(answer.stands[accepted + 1 :, start], most)
            fresh = leading(answer.stands[:, after], most)
            found.setdefault(accepted, []).append((branch + 1, fresh + 1))
    rows = [_branch_row(depth, pairs) for depth, pairs in sorted(found.items())]
    return [*rows, _branch_row(-1, [pair for pairs in found.values() for pair in pairs])] if rows else []


def _branch_row(depth: int, pairs: Sequence[tuple[int, int]]) -> BranchRow:
    branch, fresh = np.mean(np.array(pairs), axis=0).tolist()
    return BranchRow(depth, len(pairs), branch, fresh)


def report(answers: Mapping[str, Sequence[Answer]], lookaheads: Sequence[int], branch_lookahead: int) -> dict[str, Any]:
    """Everything as plain values. `answers` by kind of sampling, such as "greedy"."""
    result: dict[str, Any] = {}
    for kind, group in answers.items():
        ended = [answer for answer in group if answer.ended]
        result[kind] = {
            "answers": len(group),
            "ended": len(ended),
            "tokens": int(sum(answer.stands.shape[1] for answer in group)),
            "tokens_per_round": {
                str(k): {
                    "all": round(chains(group, k).tokens_per_round, 4),
                    "ended": round(chains(ended, k).tokens_per_round, 4),
                }
                for k in lookaheads
            },
            "by_position": [round(share, 4) for share in chains(group, max(lookaheads)).by_position],
            "by_depth": [round(share, 4) for share in by_depth(list(group))],
            "branches": [_plain(row) for row in branches(group, branch_lookahead, only_foreseen=False)],
            "branches_foreseen": [_plain(row) for row in branches(group, branch_lookahead, only_foreseen=True)],
        }
    return result


def _plain(row: BranchRow) -> dict[str, Any]:
    return {
        "depth": "all" if row.depth < 0 else row.depth,
        "outcomes": row.outcomes,
        "branch": round(row.branch, 4),
        "fresh": round(row.fresh, 4),
        "ratio": round(row.ratio, 4),
    }
