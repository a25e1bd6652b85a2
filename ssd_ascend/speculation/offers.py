"""What the `ssd` speculator and its `worker_client.py` say to each other of a sequence: what a step was to it, what the
worker is asked for it, and the drafts it gets."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ssd_ascend.core.speculation import Source, VerificationOutcome

if TYPE_CHECKING:
    import torch


class Offer(NamedTuple):
    """Drafts for one sequence, good while it has `num_tokens` tokens. law: [K, Vd] or None."""

    num_tokens: int
    source: Source
    tokens: list[int]
    law: torch.Tensor | None
    looked_up: bool


class Asked(NamedTuple):
    """What a request asks for a sequence: tokens it will then have, whether the cache is looked up, and whether its
    drafts are point masses, which can be told ahead."""

    num_tokens: int
    looked_up: bool
    foreseeable: bool = True


class Step(Protocol):
    """What a step was to one sequence: an `Update`, or what will become one."""

    @property
    def outcome(self) -> VerificationOutcome:
        """Whose, and what."""
        ...

    @property
    def num_tokens_before(self) -> int:
        """Of the sequence."""
        ...

    @property
    def new_tokens(self) -> list[int]:
        """What it gained."""
        ...


class LookedUp(NamedTuple):
    """What is known of some steps before their worker answers. drafts: by sequence, where the outcome was foreseen;
    declined: sequences for which no answer would bring any."""

    steps: Rows[Step]
    drafts: dict[int, list[int]]
    declined: set[int]

    @property
    def is_settled(self) -> bool:
        """Whether nobody need wait for an answer."""
        return len(self.drafts) + len(self.declined) == len(self.steps)

    def of(self, seq_ids: Container[int]) -> LookedUp:
        """The part that is about these."""
        return LookedUp(
            [step for step in self.steps if step.outcome.seq_id in seq_ids],
            {seq_id: drafts for seq_id, drafts in self.drafts.items() if seq_id in seq_ids},
            {seq_id for seq_id in self.declined if seq_id in seq_ids},
        )
