"""What the scheduler decided for one step. Values only; nobody but `Scheduler.commit` acts on a `Sequence`.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd_ascend.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A sequence that decodes this step; KV slots for `max_drafts` drafts beyond its last token are reserved."""

    seq: Sequence
    max_drafts: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + length) of a sequence to be computed; the last chunk also draws the next token."""

    seq: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """True when the chunk reaches the end of the tokens so far."""
        return self.start + self.length == self.seq.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decode rows first, then prefill chunks, in the order they lie in the packed batch."""

    decoding: list[DecodeRow]
    prefills: list[PrefillChunk]
    preempted: list[int] = field(default_factory=list)
    """Ids of sequences that lost their KV blocks while this plan was made."""

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to run."""
        return not self.decoding and not self.prefills

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that draw tokens this step: every decode row, then every last chunk, in batch order."""
        return [row.seq for row in self.decoding] + [chunk.seq for chunk in self.prefills if chunk.is_last]
