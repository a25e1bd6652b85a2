"""What goes into an engine and what comes out, as plain values that can cross a process boundary. Torch-free.

An engine deals in tokens only; text (templates, detokenizing, stop strings) is the business of whoever holds the other
end.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate. A request with n > 1 becomes n of these, with seeds of their own.

    `id` is chosen by the sender and unique while the sequence lives. `sampling.seed` must be set.
    """

    id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """What speculation did for one sequence so far, and what its prompt found cached. Counts of tokens unless said."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    """Verify (or plain decode) steps after the prompt."""
    drafted: int = 0
    accepted: int = 0
    """Drafts that were both accepted and emitted (a draft past a stop token does not count)."""
    lookups: int = 0
    """Speculation-cache look-ups."""
    hits: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What one step added to one sequence; the last one carries `finish_reason`.

    `logprobs` has one entry per token when the request asked for them. `error` is set when finish_reason is "error".
    """

    seq_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    sources: list[int] | None = None
    """Per token: 0 recovery, 1 accepted from an on-demand draft, 2 accepted from a cache hit."""
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    refused: bool = False
    """The error is about what the request asks, not about us."""
    stats: SequenceStats | None = None
    """The sequence so far, on every delta: a stop string, which only the text side sees, may make any the last."""
