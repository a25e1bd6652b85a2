"""The speculation cache: outcome -> the speculation prepared for it. Lives in the draft worker, one generation per
round.

Keys and tokens are on the host, so that a look-up is a dictionary access; laws and features stay where they were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.speculation.base import Chain

_Key = tuple[int, int]
_KEY_BYTES = 24
"""Of the outcome that an entry is filed under."""


class Carried(NamedTuple):
    """What goes with drafts, row by row: see `Chain`. Nothing, for the likeliest tokens of a model."""

    law: torch.Tensor | None = None
    has_law: Rows[bool] = ()
    hidden: torch.Tensor | None = None

    @staticmethod
    def by(chain: Chain) -> Carried:
        """What a chain's drafts carry."""
        return Carried(chain.law, chain.has_law, chain.hidden)


class CachedSpeculation(NamedTuple):
    """Row `row` of what was drafted together. Most are never asked for: law and features are cut out when they are."""

    tokens: list[int]
    carried: Carried
    row: int

    @property
    def has_law(self) -> bool:
        """Whether the drafts were drawn, rather than the likeliest."""
        return self.carried.law is not None and self.carried.has_law[self.row]

    @property
    def law(self) -> torch.Tensor | None:
        """[K, Vd] what the drafts were drawn from, or None for a point mass."""
        law = self.carried.law
        return law[self.row, : len(self.tokens)] if law is not None and self.has_law else None

    @property
    def hidden(self) -> torch.Tensor | None:
        """[K, H], see `Chain.hidden`, or None."""
        return None if self.carried.hidden is None else self.carried.hidden[self.row, : len(self.tokens)]


def drafts_of(chain: Chain) -> list[list[int]]:
    """The tokens of each row, which waits for the device."""
    return [row[:count] for row, count in zip(chain.tokens.tolist(), chain.num_tokens, strict=True)]


class SpeculationCache:
    """Holds at most one generation of branches per sequence, so its size is bounded by batch * width * lookahead."""

    def __init__(self) -> None:
        self._of_sequence: dict[int, dict[_Key, CachedSpeculation]] = {}
        self._bytes_of: dict[int, int] = {}
        self.num_bytes = 0
        """Held now. Kept count of, because every answer reports it."""

    def __len__(self) -> int:
        """Outcomes that are prepared for."""
        return sum(map(len, self._of_sequence.values()))

    def look_up(self, outcome: VerificationOutcome) -> CachedSpeculation | None:
        """The speculation prepared for `outcome`; None is a miss."""
        return self.of_sequence(outcome.seq_id).get((outcome.num_accepted, outcome.recovery_token))

    def of_sequence(self, seq_id: int) -> Mapping[_Key, CachedSpeculation]:
        """All that is prepared for a sequence, by accepted drafts and recovery token."""
        return self._of_sequence.get(seq_id, {})

    def rank_of(self, outcome: VerificationOutcome) -> tuple[int | None, int]:
        """Which of the outcomes prepared for, with as many accepted drafts, this one is (None: of none), and of how
        many; they were filed best first."""
        rank, count = None, 0
        for num_accepted, token in self.of_sequence(outcome.seq_id):
            if num_accepted == outcome.num_accepted:
                if token == outcome.recovery_token:
                    rank = count
                count += 1
        return rank, count

    def fill(self, outcomes: Rows[VerificationOutcome], drafts: Rows[list[int]], carried: Carried) -> None:
        """drafts[i] is what to answer when outcomes[i] comes true, with row i of `carried`. Earlier entries of their
        sequences go."""
        self.drop({outcome.seq_id for outcome in outcomes})
        per_draft, per_law = 8 + _row_bytes(carried.hidden), _row_bytes(carried.law)
        for row, ((seq_id, accepted, token), tokens) in enumerate(zip(outcomes, drafts, strict=True)):
            own, key = self._of_sequence.setdefault(seq_id, {}), (accepted, token)
            if not tokens or key in own:
                continue
            own[key] = entry = CachedSpeculation(tokens, carried, row)
            held = len(tokens) * (per_draft + (per_law if entry.has_law else 0)) + _KEY_BYTES
            self._bytes_of[seq_id] = self._bytes_of.get(seq_id, 0) + held
            self.num_bytes += held

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget what was prepared for sequences."""
        for seq_id in seq_ids:
            self.num_bytes -= self._bytes_of.pop(seq_id, 0)
            self._of_sequence.pop(seq_id, None)


def _row_bytes(wide: torch.Tensor | None) -> int:
    """Of one draft's law or feature."""
    return 0 if wide is None else wide.shape[-1] * wide.element_size()
