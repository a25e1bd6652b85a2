"""The speculation cache: outcome -> the speculation prepared for it. Lives in the draft worker, one generation per
round.

Keys and tokens are on the host, so that a look-up is a dictionary access; laws and features stay where they were made.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.speculation.base import Chain


@dataclass(frozen=True, slots=True)
class CachedSpeculation:
    """tokens: the drafts. law: [K, Vd] what they were drawn from, or None for a point mass. hidden: [K, H] or None."""

    tokens: list[int]
    law: torch.Tensor | None
    hidden: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of law, features, tokens, and the outcome it is filed under."""
        held = sum(t.numel() * t.element_size() for t in (self.law, self.hidden) if t is not None)
        return held + 8 * (len(self.tokens) + 3)


class SpeculationCache:
    """Holds at most one generation of branches per sequence, so its size is bounded by batch * width * lookahead."""

    def __init__(self) -> None:
        self._entries: dict[VerificationOutcome, CachedSpeculation] = {}
        self._of_sequence: dict[int, list[VerificationOutcome]] = {}
        self.lookups = 0
        self.hits = 0
        self.num_bytes = 0
        """Held now. Kept count of, because every answer reports it."""

    def __len__(self) -> int:
        """Outcomes that are prepared for."""
        return len(self._entries)

    def look_up(self, outcome: VerificationOutcome) -> CachedSpeculation | None:
        """The speculation prepared for `outcome`; counts the hit or miss."""
        self.lookups += 1
        entry = self._entries.get(outcome)
        self.hits += entry is not None
        return entry

    def of_sequence(self, seq_id: int) -> list[tuple[VerificationOutcome, CachedSpeculation]]:
        """All that is prepared for a sequence."""
        return [(outcome, self._entries[outcome]) for outcome in self._of_sequence.get(seq_id, ())]

    def fill(self, outcomes: Rows[VerificationOutcome], chain: Chain) -> None:
        """Row i of `chain` is what to answer when outcomes[i] comes true. Earlier entries of their sequences go."""
        self.drop({outcome.seq_id for outcome in outcomes})
        tokens = chain.tokens.tolist()
        for i, outcome in enumerate(outcomes):
            count = chain.num_tokens[i]
            if count == 0 or outcome in self._entries:
                continue
            law = chain.law[i, :count] if chain.law is not None and chain.has_law[i] else None
            hidden = None if chain.hidden is None else chain.hidden[i, :count]
            entry = self._entries[outcome] = CachedSpeculation(tokens[i][:count], law, hidden)
            self.num_bytes += entry.num_bytes
            self._of_sequence.setdefault(outcome.seq_id, []).append(outcome)

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget what was prepared for sequences."""
        for seq_id in seq_ids:
            for outcome in self._of_sequence.pop(seq_id, ()):
                self.num_bytes -= self._entries.pop(outcome).num_bytes
