"""The values that pass between speculator, verifier and scheduler. Torch appears in annotations only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class VerificationOutcome(NamedTuple):
    """The one thing the target says after a step; also the key of the speculation cache.

    `num_accepted` draft tokens were kept (0..K), then the target put `recovery_token` itself.
    """

    seq_id: int
    num_accepted: int
    recovery_token: int


class Source(enum.IntEnum):
    """How a row's speculation came about; a metric label, and nothing else depends on it."""

    DECLINED = 0
    MISS = 1
    """Drafted on demand (always so for `sd`; after a cache miss for `ssd`)."""
    HIT = 2
    """Answered from the speculation cache."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft tokens for B rows, and the law they were drawn from.

    tokens: int64 [B, K] on the target's device, or on the host where `host_tokens` are there; row i holds
        `num_tokens[i]` drafts, the rest is padding (any valid id).
    num_tokens: host, 0..K per row; 0 is a declined row, which is an ordinary decode step.
    draft_logits: None, or float32 [B, K, V]: row i's token j was drawn from softmax(draft_logits[i, j]), bit for bit
        the values that were sampled from (temperature and every processor applied; -inf outside the support).
    has_law: host, per row; True when row i's tokens were drawn from `draft_logits[i]`. False: the row is a point mass
        (arg-max drafts, n-grams, anything deterministic), which the verifier accepts with probability p(token).
    looked_up: host, per row; True when the speculation cache was asked for the row. Empty: it never was.
    host_tokens: the drafts on the host, where whoever proposes has them there; None when nobody has. What a grammar
        lets follow depends on them, and is worked out while the target's forward is under way.
    under_way: host, per row; the row of the verification that was queued before anybody asked, see
        `engine/rounds_ahead.py`. Empty: none was.
    """

    tokens: torch.Tensor | None
    num_tokens: list[int]
    source: list[Source]
    draft_logits: torch.Tensor | None = None
    has_law: list[bool] = field(default_factory=list)
    looked_up: list[bool] = field(default_factory=list)
    host_tokens: list[list[int]] | None = None
    under_way: list[int] = field(default_factory=list)

    @staticmethod
    def declined(num_rows: int) -> Speculation:
        """No drafts for any of `num_rows` rows."""
        return Speculation(None, [0] * num_rows, [Source.DECLINED] * num_rows, None, [False] * num_rows)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.num_tokens)

    @property
    def is_empty(self) -> bool:
        """True when every row declined."""
        return not any(self.num_tokens)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one emitted token under the model's own law (before temperature and processors)."""

    token: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The most likely alternatives, best first."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The target's verdict, on the host. Row i gained `new_tokens[i]` = accepted drafts + recovery token.

    faults: sequence id -> why the target's own logits gave it no law (NaN, inf). Such a row gained nothing
        (`new_tokens[i]` is empty, its outcome a placeholder) and can only end with an error; the others are unaffected.
    refused: those of them whose grammar left no token, which is the request's fault and not ours.
    """

    outcomes: list[VerificationOutcome]
    new_tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    faults: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
