"""What target and draft worker say to each other: one `Request` down and one `Answer` up per step, and between them,
unasked, what the worker has `Foreseen`.

A request carries everything the worker needs to bring its own copy of each sequence up to date; the worker keeps no
secret state, so a fresh one can be attached at any step. Tensors may live on the sender's device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.core.speculation import VerificationOutcome

PROTOCOL_VERSION = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of both sides after a link is up; what does not match is refused with both values named.

    to_target: worker only; int64 [draft_vocab] target id of each draft id, or None when the vocabularies are one.
    feature_width: n_capture * H of the target, 0 when the drafter wants none. target: which target it is, see
    `speculation.identity`; max_model_len: of its sequences, or what the worker can follow. Both empty between a target
    and a worker of its own.
    """

    version: int
    target_vocab: int
    draft_vocab: int
    feature_width: int
    lookahead: int
    drafter: str
    to_target: torch.Tensor | None = None
    target: str = ""
    max_model_len: int = 0
    reads_features: bool = False
    """Worker only: it reads the target's features where they are, and wants their places instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A sequence the worker does not know: all N tokens so far, and features of the first N - 1 (or None)."""

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    features: torch.Tensor | None = None
    """[N - 1, F]"""
    slots: torch.Tensor | None = None
    """Where they are instead, for a worker that reads them there: int64 [N - 1, 1], rows of the target's store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A known sequence after a step. It had `num_tokens_before` tokens; it gained new_tokens = accepted + recovery.

    features: [len(new_tokens), F] of the positions num_tokens_before - 1, ... : the old last token and the accepted
    ones.
    """

    outcome: VerificationOutcome
    num_tokens_before: int
    new_tokens: list[int]
    features: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    """Likewise [len(new_tokens), 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One step's news. The worker answers for every attached and updated sequence, in this order: attaches, updates."""

    number: int
    """Counts up by one; an answer repeats it."""
    released: list[int] = field(default_factory=list)
    attaches: list[Attach] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    fan_out: list[int] = field(default_factory=list)
    """Guesses per accepted length from now on; empty: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Running totals of one worker since it started, of what its target cannot count itself. Seconds and counts."""

    idle_s: float = 0.0
    """Spent waiting for a request."""
    cached_drafts: int = 0
    """Draft tokens computed for the speculation cache."""
    used_drafts: int = 0
    """Of these, sent to the target on a hit."""
    cache_bytes: int = 0
    """Held by the speculation cache now."""

    def __add__(self, later: WorkerStats) -> WorkerStats:
        """Totals over two workers' lives; the cache is that of the later one."""
        return WorkerStats(
            idle_s=self.idle_s + later.idle_s,
            cached_drafts=self.cached_drafts + later.cached_drafts,
            used_drafts=self.used_drafts + later.used_drafts,
            cache_bytes=later.cache_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Row i is for sequence seq_ids[i]: its drafts, in the target's vocabulary, and how they came about.

    sources: `core.speculation.Source` values. has_law: rows whose law is in `law`, in order: law [sum(has_law), K, Vd]
    log-weights over the draft vocabulary, in the dtype the tokens were drawn in, of which a row's drafts use as many
    positions as there are; None when no row has one.
    """

    number: int
    seq_ids: list[int]
    sources: list[int]
    drafts: list[list[int]]
    has_law: list[bool]
    law: torch.Tensor | None = None
    stats: WorkerStats = field(default_factory=WorkerStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What the worker has ready, told ahead: a target that finds its outcome here need not wait for the answer.

    Sequence i had num_tokens[i] tokens before the outcome, and owns counts[i] of the `entries`, in order. An entry is
    3 + lookahead numbers: num_accepted, recovery token, number of drafts, the drafts (padded). Only point masses: a law
    travels with the answer. number: of the request whose round it was. worth_from: for how many missing rows the worker
    would draft on demand; for fewer there is nothing to wait for.
    """

    number: int
    lookahead: int
    seq_ids: list[int]
    num_tokens: list[int]
    counts: list[int]
    entries: list[int]
    worth_from: int = 1
    stats: WorkerStats = field(default_factory=WorkerStats)


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The target leaves; the worker exits."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A speculator's answer to the hello of a target it cannot serve; it hangs up after it."""

    reason: str


Message = Hello | Request | Answer | Foreseen | Shutdown | Refusal
