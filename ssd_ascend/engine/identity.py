"""What an engine is and what it can take, as plain values that cross the process boundary. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a banner, a result file or `/v1/models` says about an engine; `device` says "(emulated)" where it is."""

    model: str
    device: str
    dtype: str
    speculator: str
    drafter: str
    lookahead: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a request must keep to. `max_tokens_that_fit` bounds prompt and answer together."""

    max_model_len: int
    max_tokens_that_fit: int
    vocab_size: int
