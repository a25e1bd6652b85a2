"""What the host does while it waits for a verdict: practise what it will have to do when that is there.

A step is long enough for a processor to forget the way from a verdict to the next launch: a walk through some hundred
functions takes several times as long after 3 ms of waiting as at once. So the way is walked over and over, with an
outcome that was foreseen, up to where the device would be told to run. Used by the step loop where a worker drafts
elsewhere: one in this process would wait for the interpreter meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import Final, Protocol, runtime_checkable

import numpy as np

from ssd_ascend.core.batch import ModelOutput
from ssd_ascend.core.sequence import Sequence
from ssd_ascend.core.speculation import Speculation, Verification, VerificationOutcome
from ssd_ascend.engine.hits_ahead import HitsAhead
from ssd_ascend.speculation.base import NextRow
from ssd_ascend.speculation.verifier import Verifier

_PAUSE_S: Final = 0.0003
"""Between two walks; from 0.1 to 1 ms it makes little difference."""
_REST: Final = 2.0
"""And so many times as long as the walk took, as a verdict that comes meanwhile has to wait."""


@runtime_checkable
class ForetellingSpeculator(Protocol):
    """A speculator that can say what it would do after a verdict, without doing it."""

    is_apart: bool
    """Whether who drafts has another device, and another process."""

    def foretold(self, sequences: Rows[Sequence]) -> list[VerificationOutcome]:
        """An outcome that was foreseen for each sequence; those without one are left out."""
        ...

    def next_rows(self, sequences: Rows[Sequence], verification: Verification) -> list[NextRow]:
        """The next step's rows after such a verdict, [] where they would not be known. Nothing comes of it."""
        ...


class Practice:
    """Of one engine."""

    def __init__(self, verifier: Verifier, speculator: ForetellingSpeculator, hits: HitsAhead) -> None:
        self._verifier = verifier
        self._speculator = speculator
        self._hits = hits

    def until_there(self, sequences: Rows[Sequence], speculation: Speculation, output: ModelOutput) -> None:
        """Walk the way until the verdict of this step is there; returns at once where no outcome was foreseen."""
        verdict = output.verdict
        if verdict is None or verdict.is_there():
            return
        outcomes = self._speculator.foretold(sequences)
        if len(outcomes) < len(sequences) or speculation.host_tokens is None:
            return
        made_up = _MadeUp(_pairs(speculation, outcomes))
        while not verdict.is_there():
            began_s = time.monotonic()
            verification = self._verifier.verify(sequences, speculation, output.logits, output.greedy, made_up)
            self._hits.practise(self._speculator.next_rows(sequences, verification))
            now_s = time.monotonic()
            until_s = now_s + max(_PAUSE_S, _REST * (now_s - began_s))
            while now_s < until_s and not verdict.is_there():
                now_s = time.monotonic()


class _MadeUp:
    """A verdict nobody waits for, which is read as others are. An `Awaited`."""

    def __init__(self, pairs: list[list[int]]) -> None:
        self._array = np.array(pairs)

    def is_there(self) -> bool:
        """See `Awaited`."""
        return True

    def rows(self) -> list[list[int]]:
        """See `Awaited`."""
        rows: list[list[int]] = self._array.tolist()
        return rows


def _pairs(speculation: Speculation, outcomes: Rows[VerificationOutcome]) -> list[list[int]]:
    """What the device would tell, were these the outcomes: of each row the token it emits, and the one fed there."""
    pairs: list[list[int]] = []
    assert speculation.host_tokens is not None
    for drafts, count, outcome in zip(speculation.host_tokens, speculation.num_tokens, outcomes, strict=True):
        emitted = [*drafts[: min(outcome.num_accepted, count)], outcome.recovery_token]
        emitted += [0] * (count + 1 - len(emitted))
        pairs += [list(pair) for pair in zip(emitted, [0, *drafts[:count]], strict=True)]
    return pairs
