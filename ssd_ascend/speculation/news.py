"""What a draft worker is told of a sequence after a step. Made and posted by `speculators/ssd.py`."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Rows
from typing import Final, NamedTuple

from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Verification, VerificationOutcome
from ssd_ascend.speculation.ending import surely_ends
from ssd_ascend.speculation.offers import Asked
from ssd_ascend.transport.frame import MAX_MESSAGE_BYTES
from ssd_ascend.transport.messages import Attach, Update

NEW_BYTES: Final = 256 << 20
"""Of features of sequences that the worker does not know yet, in one message."""
LONGEST_BYTES: Final = MAX_MESSAGE_BYTES - (64 << 20)
"""Of the features of one sequence; a longer one is decoded plainly."""


class Going(NamedTuple):
    """A sequence that goes on after this step, and whether the worker knows it. num_tokens: this step's with them."""

    seq: Sequence
    outcome: VerificationOutcome
    num_tokens_before: int
    new_tokens: list[int]
    num_tokens: int
    known: bool

    @property
    def asked(self) -> Asked:
        """What the worker is asked for it."""
        sampling = self.seq.sampling
        return Asked(self.num_tokens, self.known, foreseeable=sampling.greedy or sampling.reproducible)

    @property
    def start(self) -> int:
        """The first position whose feature the worker has not been sent."""
        return self.num_tokens_before - 1 if self.known else 0

    @property
    def end(self) -> int:
        """Positions below this one have features: all but the recovery token's."""
        return self.num_tokens - 1

    def attach(self) -> Attach:
        """For a worker that does not know it."""
        return attach_of(self.seq, self.new_tokens)

    def update(self) -> Update:
        """For one that does."""
        return Update(outcome=self.outcome, num_tokens_before=self.num_tokens_before, new_tokens=self.new_tokens)


def who_go_on(sequences: Rows[Sequence], verification: Verification, attached: Container[int]) -> list[Going]:
    """Those that this step did not end for all that is known. attached: sequences that the worker knows."""
    going = []
    for seq, outcome, new_tokens in zip(sequences, verification.outcomes, verification.new_tokens, strict=True):
        if outcome.seq_id in verification.faults or surely_ends(seq, new_tokens):
            continue
        before = seq.num_tokens
        known = outcome.seq_id in attached
        going.append(Going(seq, outcome, before, new_tokens, before + len(new_tokens), known))
    return going


def attach_of(seq: Sequence, new_tokens: list[int]) -> Attach:
    """The whole sequence, these tokens with it."""
    return Attach(
        seq_id=seq.id,
        token_ids=seq.token_ids + new_tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        sampling=seq.sampling,
        seed=seq.seed,
        stop_ids=seq.stop_ids,
    )


def that_fit(going: Rows[Going], token_bytes: int) -> list[Going]:
    """Without the new ones whose features, of so many bytes a token, would make a message too long: their turn comes
    with a later step. One that fits no message is left out for good."""
    if not token_bytes:
        return list(going)
    room, fitting = NEW_BYTES, list[Going]()
    for one in going:
        size = 0 if one.known else (one.end - one.start) * token_bytes
        if size <= room or (room == NEW_BYTES and size <= LONGEST_BYTES):
            room = max(0, room - size)
            fitting.append(one)
    return fitting
