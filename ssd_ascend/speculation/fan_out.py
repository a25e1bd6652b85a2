"""Which outcomes to prepare for: the only home of the numbers F_j, and of the choice of guesses.

An outcome is (j drafts accepted, then token t). `FixedFanOut` gives every j its own count; `AdaptiveFanOut` takes the
likeliest outcomes overall, P(j) * q_j(t), with P(j) from how often drafts of a given confidence were accepted so far.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ssd_ascend.config.speculation import FanOutSpec
from ssd_ascend.runtime.pack import index_on, to_device
from ssd_ascend.speculation.base import Branch, DraftSequence, Glue

_ADAPTIVE_PER_DEPTH = 3
"""Guesses per accepted length of the adaptive fan-out, on average: as many as the fixed one has by default."""


class Guesses(NamedTuple):
    """Branches, those of one sequence adjacent, and the token each guesses: int64 [len(branches)] on the device."""

    branches: list[Branch]
    tokens: torch.Tensor


class FanOut(Protocol):
    """Chooses the outcomes worth a branch."""

    @property
    def width(self) -> int:
        """The most branches per sequence."""
        ...

    def choose(self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], glue: Glue) -> Guesses:
        """Guesses for sequences whose drafts `sent` are under verification. May overwrite `glue.scores`."""
        ...

    def learn(self, seq_id: int, num_accepted: int) -> None:
        """What became of the drafts last chosen for."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence is gone."""
        ...


def make_fan_out(spec: FanOutSpec, lookahead: int) -> FanOut:
    """The fan-out that a configuration asks for, for speculations of up to `lookahead` drafts."""
    if spec == "auto":
        return AdaptiveFanOut(width=_ADAPTIVE_PER_DEPTH * (lookahead + 1))
    per_depth = (spec,) * (lookahead + 1) if isinstance(spec, int) else tuple(spec)
    return FixedFanOut(per_depth)


def _exclude_sent(sent: Rows[Rows[int]], glue: Glue) -> None:
    """A draft that is rejected cannot come back as the recovery token: its mass there is max(0, p - q) = 0."""
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for drafts, num_rows in zip(sent, glue.num_rows, strict=True):
        count = min(len(drafts), num_rows)
        rows += range(first, first + count)
        tokens += drafts[:count]
        first += num_rows
    if rows:
        index = index_on([rows, tokens], glue.scores.device)
        glue.scores[index[0], index[1]] = float("-inf")


@dataclass(frozen=True)
class FixedFanOut:
    """per_depth[j] guesses for j accepted drafts. A sequence without drafts puts the whole width on its only depth.

    A value: where rounds were captured for one, they serve any that is equal.
    """

    per_depth: tuple[int, ...]

    @property
    def width(self) -> int:
        """See `FanOut`."""
        return sum(self.per_depth)

    def counts(self, num_drafts: int) -> list[int]:
        """Guesses per depth for a speculation of `num_drafts`: the depths beyond it go to the last one it has."""
        return [*self.per_depth[:num_drafts], sum(self.per_depth[num_drafts:])]

    def choose(self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], glue: Glue) -> Guesses:
        """The per_depth[j] likeliest tokens of every row."""
        _exclude_sent(sent, glue)
        branches: list[Branch] = []
        ranks: list[int] = []
        first = 0
        for seq, drafts, num_rows in zip(seqs, sent, glue.num_rows, strict=True):
            for depth, wanted in enumerate(self.counts(len(drafts))[:num_rows]):
                count = min(wanted, glue.scores.shape[1] - 1)  # a tiny vocabulary has no more to guess
                branches += [Branch(seq, depth, first + depth)] * count
                ranks += range(count)
            first += num_rows
        if not branches:
            return Guesses([], torch.empty(0, dtype=torch.int64))
        best = glue.scores.topk(min(max(ranks) + 1, glue.scores.shape[1]), dim=-1).indices
        index = torch.tensor([[branch.glue_row for branch in branches], ranks], dtype=torch.int64)
        index = to_device(index, best.device)
        return Guesses(branches, best[index[0], index[1]])

    def learn(self, seq_id: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Nothing is kept."""


_BUCKETS = 10
_PRIOR = 8.0
"""Pseudo-observations per bucket: until there is evidence, a draft is as likely to stand as its confidence says."""


class AdaptiveFanOut:
    """The `width` likeliest outcomes of each sequence.

    The chance that draft j stands is read off how often drafts of like confidence q_j(s_j) have stood; the recovery
    token after a rejection follows q_j without s_j, and after the last draft q_K.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._kept = [_PRIOR * (b + 0.5) / _BUCKETS for b in range(_BUCKETS)]
        self._seen = [_PRIOR] * _BUCKETS
        self._confidence: dict[int, list[float]] = {}

    def choose(self, seqs: Rows[DraftSequence], sent: Rows[Rows[int]], glue: Glue) -> Guesses:
        """One copy to the host of the top tokens of every row, then a merge by P(j) * q_j(t)."""
        top = min(self.width, glue.scores.shape[1])
        confidences = self._confidences(sent, glue)
        _exclude_sent(sent, glue)
        chance, token = torch.softmax(glue.scores, dim=-1).topk(top, dim=-1)
        chances, tokens = chance.tolist(), token.tolist()
        branches: list[Branch] = []
        guessed: list[int] = []
        first = 0
        for seq, drafts, num_rows in zip(seqs, sent, glue.num_rows, strict=True):
            own = confidences[first : first + min(len(drafts), num_rows)]
            self._confidence[seq.id] = own
            picked = self._pick(own, chances[first : first + num_rows])
            branches += [Branch(seq, depth, first + depth) for depth, _ in picked]
            guessed += [tokens[first + depth][rank] for depth, rank in picked]
            first += num_rows
        return Guesses(branches, index_on(guessed, glue.scores.device))

    def _confidences(self, sent: Rows[Rows[int]], glue: Glue) -> list[float]:
        """q_j(s_j) of every row that has a draft to confirm; 0 for the others."""
        flat: list[int] = []
        for drafts, num_rows in zip(sent, glue.num_rows, strict=True):
            flat += [*drafts, 0][:num_rows]
        index = index_on(flat, glue.scores.device)
        own = glue.scores.gather(1, index[:, None])[:, 0] - glue.scores.logsumexp(-1)
        confidences: list[float] = own.exp().tolist()
        return confidences

    def _pick(self, confidences: Rows[float], chances: Rows[Rows[float]]) -> list[tuple[int, int]]:
        """(depth, rank) of the likeliest outcomes of one sequence, by depth."""
        outcomes: list[tuple[float, int, int]] = []
        reach = 1.0
        for depth, row in enumerate(chances):
            stands = self._acceptance(confidences[depth]) if depth < len(confidences) else 0.0
            outcomes += [
                (reach * (1.0 - stands) * chance, depth, rank) for rank, chance in enumerate(row) if chance > 0.0
            ]
            reach *= stands
        outcomes.sort(key=lambda outcome: (-outcome[0], outcome[1], outcome[2]))
        return sorted((depth, rank) for _, depth, rank in outcomes[: self.width])

    def _acceptance(self, confidence: float) -> float:
        bucket = min(int(confidence * _BUCKETS), _BUCKETS - 1)
        return self._kept[bucket] / self._seen[bucket]

    def learn(self, seq_id: int, num_accepted: int) -> None:
        """Drafts before `num_accepted` stood, the one there fell, later ones were never looked at."""
        for j, confidence in enumerate(self._confidence.pop(seq_id, ())[: num_accepted + 1]):
            bucket = min(int(confidence * _BUCKETS), _BUCKETS - 1)
            self._seen[bucket] += 1.0
            self._kept[bucket] += j < num_accepted

    def forget(self, seq_id: int) -> None:
        """Drop what is kept of a sequence."""
        self._confidence.pop(seq_id, None)
