"""What an engine's output side gives: the pieces of an answer as they come, the whole of it, and what it took.

Made by `engine/outputs.py`, read by `llm.py` and the server. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd_ascend.core.speculation import TokenLogprobs
from ssd_ascend.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """What one finished answer took. Counts of tokens unless said; only kept tokens count, the stop token included."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    steps: int
    drafted: int
    accepted: int
    cache_lookups: int
    cache_hits: int
    preemptions: int
    ttft_s: float
    """From submission to the first token."""
    decode_s: float
    """From the first token to the last."""

    @property
    def rejected(self) -> int:
        """Drafts the target did not keep."""
        return self.drafted - self.accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens kept per verify step, recovery included; the first token came with the prompt. 1 when no step ran."""
        return (self.completion_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second; 0 when there are none."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s > 0 else 0.0


def stats_dict(stats: AnswerStats, *, device: str) -> dict[str, object]:
    """The `stats` object that `generate --json`, `LLM` and benchmarks show; its names are a contract."""
    return {
        "device": device,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": round(stats.acceptance_length, 4),
        "cache_lookups": stats.cache_lookups,
        "cache_hits": stats.cache_hits,
        "preemptions": stats.preemptions,
        "ttft_s": round(stats.ttft_s, 6),
        "decode_tokens_per_s": round(stats.decode_tokens_per_s, 3),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What one step added to answer `index` of a request. Lists are per kept token; the last has reason and stats.

    `text` may lag behind `token_ids` (it could become a stop string) and has no text of the stop itself.
    `offsets` say where in the answer's text each token begins. `waited_s` is the time since the answer's tokens before
    these, or since submission when `is_first`. `stop_reason` is the stop string, or the stop token id
    that the request named, that ended the answer. `error` is set when `finish_reason` is "error", and `refusal` beside
    it where the request is what is wrong, not the engine.
    """

    request_id: int
    index: int
    text: str
    token_ids: list[int]
    offsets: list[int]
    is_first: bool = False
    waited_s: float = 0.0
    logprobs: list[TokenLogprobs] | None = None
    sources: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    refusal: RequestError | None = None
    stats: AnswerStats | None = None


@dataclass(slots=True)
class Answer:
    """One whole answer, put together from its deltas with `extend`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    sources: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    stats: AnswerStats | None = None

    def extend(self, delta: AnswerDelta) -> None:
        """Take the next delta of this answer."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.offsets += delta.offsets
        self.sources += delta.sources or []
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.error, self.stats = delta.error, delta.stats
