"""What one timed run of a batch gave, in numbers that mean the same for every engine. Filled by modes and rivals.

A step is a *decode* step when it computed no prompt and every running sequence gained from it; the rest is prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine. `wall_ns` runs from the end of the step before, so nothing between steps is lost."""

    wall_ns: int
    num_rows: int
    num_tokens: int
    is_decode: bool
    spans_ns: Mapping[str, int] = field(default_factory=dict)
    lookups: int = 0
    hits: int = 0
    rounds_ns: int = 0
    """From the end of `observe` of the step before to the end of `propose`: how long drafts were waited for."""
    idle_ns: int = 0
    """How long the drafter had nothing to do before its last request, at most `wall_ns`."""


@dataclass(slots=True)
class Drafting:
    """What drafting did during a sample. Counts of tokens or rows."""

    drafted: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    lookups: int = 0
    hits: int = 0
    """Counted before any fallback."""
    hit_rows_tokens: int = 0
    miss_rows: int = 0
    miss_rows_tokens: int = 0
    wasted: int = 0
    cache_bytes: int = 0


@dataclass(slots=True)
class Answer:
    """One sequence from its first token on: the tokens after that one, the steps and the time they took."""

    tokens: int = 0
    steps: int = 0
    decode_ns: int = 0


@dataclass(slots=True)
class Sample:
    """One run of one batch of prompts through one engine."""

    steps: list[Step]
    prompt_tokens: int
    ttft_ns: list[int]
    """Per prompt, from the submission of the batch to its first token."""
    outputs: list[list[int]]
    """Per prompt, in their order."""
    drafting: Drafting = field(default_factory=Drafting)
    answers: list[Answer] = field(default_factory=list)
    """Per prompt, in their order; empty where the engine does not tell."""

    @property
    def decode_steps(self) -> list[Step]:
        """The steps that only decoded."""
        return [step for step in self.steps if step.is_decode]

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.outputs))

    @property
    def wall_s(self) -> float:
        """The whole run."""
        return sum(step.wall_ns for step in self.steps) / 1e9

    @property
    def decode_s(self) -> float:
        """Time of the decode steps."""
        return sum(step.wall_ns for step in self.decode_steps) / 1e9

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of decode steps over their time; 0 when nothing was decoded."""
        return sum(step.num_tokens for step in self.decode_steps) / self.decode_s if self.decode_s else 0.0

    @property
    def ms_per_step(self) -> float:
        """Mean time of a decode step."""
        steps = self.decode_steps
        return self.decode_s * 1e3 / len(steps) if steps else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per sequence and decode step, the target's own token included."""
        rows = sum(step.num_rows for step in self.decode_steps)
        return sum(step.num_tokens for step in self.decode_steps) / rows if rows else 1.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over the time of the steps that computed prompts (some of which also decode)."""
        seconds = self.wall_s - self.decode_s
        return self.prompt_tokens / seconds if seconds else 0.0

    @property
    def draft_idle_ms(self) -> float:
        """Mean time per decode step in which the drafter had nothing to do."""
        steps = self.decode_steps
        return sum(step.idle_ns for step in steps) / len(steps) / NS_PER_MS if steps else 0.0

    def span_ms(self, name: str) -> float:
        """Mean time per decode step spent under a trace span."""
        steps = self.decode_steps
        return sum(step.spans_ns.get(name, 0) for step in steps) / len(steps) / NS_PER_MS if steps else 0.0
