"""The target's copy of what its worker has foreseen: outcome -> drafts, so that a hit costs no message at all.

Both sides look the same outcome up in the same round's guesses: what is found here, the worker finds too, and drafts on
from there. Filled and asked by `worker_client.py`; `foreseen_of` is the worker's half.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.errors import TransportError
from ssd_ascend.speculation.cache import CachedSpeculation
from ssd_ascend.transport.messages import Foreseen, WorkerStats

_ACCEPTED, _RECOVERY, _COUNT, _DRAFTS = range(4)
"""Places in an entry of `Foreseen`."""


Prepared = Mapping[tuple[int, int], CachedSpeculation]
"""Of one sequence, by accepted drafts and recovery token."""


def foreseen_of(
    number: int, lookahead: int, sequences: Rows[tuple[int, int, Prepared]], *, worth_from: int, stats: WorkerStats
) -> Foreseen | None:
    """What can be told of the sequences (id, tokens, what is prepared): all but the drawn ones. None of nothing."""
    told = [
        (seq_id, num_tokens, prepared)
        for seq_id, num_tokens, prepared in sequences
        if not prepared or not next(iter(prepared.values())).has_law  # drawn, as all of its sequence are
    ]
    entries = list(chain.from_iterable(_entries(prepared, lookahead) for _, _, prepared in told))
    if not entries:
        return None
    return Foreseen(
        number=number, lookahead=lookahead, seq_ids=[each[0] for each in told], num_tokens=[each[1] for each in told],
        counts=[len(each[2]) for each in told], entries=entries, worth_from=worth_from, stats=stats,
    )  # fmt: skip


def _entries(prepared: Prepared, lookahead: int) -> list[int]:
    entries: list[int] = []
    for outcome, (tokens, _, _) in prepared.items():
        entries += outcome
        entries.append(len(tokens))
        entries += tokens
        if len(tokens) < lookahead:
            entries += [0] * (lookahead - len(tokens))
    return entries


class _Guesses(NamedTuple):
    """Of one sequence, good while it has `num_tokens` tokens: entries of `width` numbers, as they came."""

    num_tokens: int
    width: int
    entries: list[int]


class ToldAhead:
    """One generation of guesses per sequence, the latest."""

    def __init__(self, *, target_vocab: int, lookahead: int) -> None:
        self._target_vocab = target_vocab
        self._lookahead = lookahead
        self._of_sequence: dict[int, _Guesses] = {}
        self._worth_from = 1

    @property
    def worth_from(self) -> int:
        """For how many missing rows an answer brings drafts."""
        return self._worth_from

    def knows(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the guesses for this sequence, at this length, are here: who is not among them was not foreseen."""
        guesses = self._of_sequence.get(seq_id)
        return guesses is not None and guesses.num_tokens == num_tokens

    def __len__(self) -> int:
        """Sequences with guesses."""
        return len(self._of_sequence)

    def take_in(self, foreseen: Foreseen, attached: Container[int]) -> None:
        """Replace what was known of these sequences, but for those not attached. What does not fit is a
        `TransportError`: a broken worker must not reach the verifier."""
        width = _DRAFTS + self._lookahead
        entries = foreseen.entries
        drafts = [token for at in range(_DRAFTS, width) for token in entries[at::width]]
        counts = entries[_COUNT::width]
        if (
            foreseen.lookahead != self._lookahead
            or sum(foreseen.counts) * width != len(entries)
            or max(drafts, default=0) >= self._target_vocab
            or max(counts, default=0) > self._lookahead
        ):
            raise TransportError(f"what the worker foresaw in round {foreseen.number} does not fit this target")
        self._worth_from = foreseen.worth_from
        end = 0
        for seq_id, num_tokens, count in zip(foreseen.seq_ids, foreseen.num_tokens, foreseen.counts, strict=True):
            start, end = end, end + count * width
            if seq_id in attached:
                self._of_sequence[seq_id] = _Guesses(num_tokens, width, entries[start:end])

    def look_up(self, outcome: VerificationOutcome, num_tokens: int) -> list[int] | None:
        """Drafts after `outcome` of a sequence that had `num_tokens` tokens before it; None when it was not foreseen,
        or nothing is known yet."""
        guesses = self._of_sequence.get(outcome.seq_id)
        if guesses is None or guesses.num_tokens != num_tokens:
            return None
        entries, width = guesses.entries, guesses.width
        for at in range(0, len(entries), width):
            if entries[at + _RECOVERY] == outcome.recovery_token and entries[at + _ACCEPTED] == outcome.num_accepted:
                return entries[at + _DRAFTS : at + _DRAFTS + entries[at + _COUNT]]
        return None

    def some_outcome(self, seq_id: int) -> VerificationOutcome | None:
        """One of those foreseen for this sequence, None where none is."""
        guesses = self._of_sequence.get(seq_id)
        if guesses is None or not guesses.entries:
            return None
        accepted, recovery = guesses.entries[-guesses.width :][:_COUNT]
        return VerificationOutcome(seq_id, accepted, recovery)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Sequences that are gone."""
        for seq_id in seq_ids:
            self._of_sequence.pop(seq_id, None)

    def clear(self) -> None:
        """The worker is gone."""
        self._of_sequence.clear()
