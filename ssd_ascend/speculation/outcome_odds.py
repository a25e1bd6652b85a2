"""How likely each outcome of a verification is: counted, per accepted length and per rank of the recovery token.

With many sequences a round has room for a few guesses of each, and which ones decides how often one is hit. Told by the
draft worker what became of its guesses; asked by `guesser.py` for the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

_PRIOR = 16.0
"""Made-up observations that a count begins with: until there is evidence, guesses go as they went in other texts."""
_STANDS = 0.75
_MOST_RANKS = 64
_MEMORY = 4096.0
"""Observations of one kind after which all of them count half, so that a new kind of text is learnt."""
Pick = tuple[int, int]
"""(accepted drafts, rank of the token guessed after them)."""


class Judged(NamedTuple):
    """An outcome: drafts accepted, of how many, and which of the guesses for that depth it was (None: of none), of how
    many."""

    num_accepted: int
    num_drafted: int
    rank: int | None
    num_guesses: int


class _Share:
    """How often something was so, of how often it was looked at."""

    __slots__ = ("_hits", "_seen")

    def __init__(self, usual: float) -> None:
        self._hits, self._seen = usual * _PRIOR, _PRIOR

    def saw(self, *, so: bool) -> None:
        self._hits += so
        self._seen += 1.0
        if self._seen > _MEMORY:
            self._hits, self._seen = self._hits / 2, self._seen / 2

    @property
    def value(self) -> float:
        return self._hits / self._seen


class OutcomeOdds:
    """Of the speculations of one worker, which are taken to be alike."""

    def __init__(self, lookahead: int) -> None:
        self._stands = [_Share(_STANDS) for _ in range(lookahead)]
        # the chance of the guess at each rank falls about as 1 / rank^2 (a miss rate of 1 / guesses)
        usual = [1.0 / ((rank + 1) * (rank + 2)) for rank in range(_MOST_RANKS)]
        self._after_rejection = [_Share(share) for share in usual]
        # after all drafts the likeliest token is as good as a draft; the others are what might follow a rejected one
        self._after_all = [_Share(_STANDS), *(_Share((1 - _STANDS) * share) for share in usual[:-1])]

    # -- what is learnt ----------------------------------------------------------------------------------------------

    def saw(self, judged: Judged) -> None:
        """An outcome."""
        num_accepted, num_drafted, rank, num_guesses = judged
        for depth in range(min(num_accepted + 1, num_drafted)):
            self._stands[depth].saw(so=depth < num_accepted)
        shares = self._after_all if num_accepted >= num_drafted else self._after_rejection
        for guess in range(min(num_guesses, _MOST_RANKS)):
            shares[guess].saw(so=guess == rank)

    # -- what is asked -----------------------------------------------------------------------------------------------

    def reach(self, num_drafts: int) -> list[float]:
        """The chance that at least 0, 1, ..., num_drafts of so many drafts are accepted."""
        chances = [1.0]
        for share in self._stands[:num_drafts]:
            chances.append(chances[-1] * share.value)
        return chances

    def ranked(self, counts: Rows[int], num_drafts: int) -> list[tuple[float, Pick]]:
        """The outcomes with up to counts[j] guesses for j accepted drafts, likeliest first, each with its chance.

        Of equals the better rank goes first, then the smaller depth."""
        reach = self.reach(num_drafts)
        found: list[tuple[float, Pick]] = []
        for depth, count in enumerate(counts[: num_drafts + 1]):
            here = reach[depth] if depth == num_drafts else reach[depth] - reach[depth + 1]
            shares = self._after_all if depth == num_drafts else self._after_rejection
            found += [(here * shares[rank].value, (depth, rank)) for rank in range(min(count, _MOST_RANKS))]
        return sorted(found, key=lambda each: (-each[0], each[1][1], each[1][0]))

    def tokens_per_round(self, counts: Rows[int], counts_declined: Rows[int], lookahead: int, width: int) -> float:
        """Tokens that a sequence gains in a round on average with `width` guesses, when one that misses gets nothing.

        A row with drafts is followed by one with drafts when it hits, else by one without; that one gains its recovery
        token, and hits in turn."""
        hit, again = (
            sum(chance for chance, _ in self.ranked(each, drafts)[:width])
            for each, drafts in ((counts, lookahead), (counts_declined, 0))
        )
        with_drafts = again / max(1e-9, again + 1.0 - hit)
        return with_drafts * sum(self.reach(lookahead)) + 1.0 - with_drafts
