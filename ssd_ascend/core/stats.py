"""Counters of one engine, kept by the step loop and read by metrics, `stats` and benchmarks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """What drafting did, summed over all sequences. Counts unless said."""

    verify_rows: int = 0
    """Rows that carried at least one draft."""
    declined_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    lookups: int = 0
    hits: int = 0
    """Counted before any fallback fills the row."""
    hit_tokens: int = 0
    """Tokens emitted (accepted + recovery) by rows that were hits."""
    miss_rows: int = 0
    miss_tokens: int = 0
    """Tokens emitted by rows drafted on demand."""
    wasted: int = 0
    """Drafts that were computed and never shown to the target, branches included."""
    draft_idle_s: float = 0.0
    target_wait_s: float = 0.0
    cache_bytes: int = 0
    """Held by the speculation cache now."""
    worker_restarts: int = 0
    worker_alive: bool = True


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of one engine."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
