"""How many branches a round may decode in all, so that a large batch does not drown a small worker.

The fan-out says how many guesses a sequence deserves; with many sequences that can be more than the worker decodes
while the target verifies. Rounds that are cut after one step halve the budget, rounds that finish raise it.
"""

from __future__ import annotations

from ssd_ascend.speculation.base import Branch
from ssd_ascend.speculation.fan_out import Guesses

_FIRST = 96
_LEAST = 24
"""So few rows cost about what one costs; cutting further would only lose hits."""
_MOST = 4096
_GROWTH = 1.25


class BranchBudget:
    """One number, halved and raised. At least one branch per sequence is always decoded."""

    def __init__(self) -> None:
        self._branches = float(_FIRST)

    def cut(self, guesses: Guesses, num_seqs: int) -> Guesses:
        """The guesses that fit: of every sequence the likeliest of each depth first."""
        share = max(1, int(self._branches) // max(1, num_seqs))
        kept = _likeliest(guesses.branches, share)
        if len(kept) == len(guesses.branches):
            return guesses
        index = guesses.tokens.new_tensor(kept)
        return Guesses([guesses.branches[i] for i in kept], guesses.tokens.index_select(0, index))

    def saw_round(self, num_branches: int, steps: int, wanted: int) -> None:
        """A round of `num_branches` came `steps` deep where `wanted` was asked for."""
        if steps <= 1 < wanted:
            self._branches = max(float(_LEAST), min(self._branches, float(num_branches)) / 2)
        elif steps == wanted:
            self._branches = min(float(_MOST), self._branches * _GROWTH)


def _likeliest(branches: list[Branch], share: int) -> list[int]:
    """Indices of at most `share` branches per sequence, in order; a depth's guesses come best first."""
    ranked: dict[int, list[tuple[int, int, int]]] = {}
    last: tuple[int, int] | None = None
    rank = 0
    for i, branch in enumerate(branches):
        rank = rank + 1 if last == (branch.seq.id, branch.depth) else 0
        last = (branch.seq.id, branch.depth)
        ranked.setdefault(branch.seq.id, []).append((rank, branch.depth, i))
    return sorted(i for own in ranked.values() for _, _, i in sorted(own)[:share])
