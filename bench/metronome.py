"""A stand-in for an engine, in a process of its own: a token for every sequence each METRONOME_MS, and no work at all.

`bench/http_layer.py` puts it behind a real server: what its process and the front end then use is the HTTP layer's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest, SequenceStats, TokenDelta
from ssd_ascend.core.stats import EngineStats
from ssd_ascend.engine.identity import EngineInfo, EngineLimits
from ssd_ascend.engine.process import main

_TOKENS = range(300, 1300)
"""What it says, over and over: ordinary text tokens of any large vocabulary."""


class Metronome:
    """The seam of `engine/engine.py`."""

    def __init__(self, config: EngineConfig) -> None:
        self._period_s = float(os.environ.get("METRONOME_MS", "20")) / 1000
        self._running: dict[int, tuple[EngineRequest, int]] = {}
        self._next_s = 0.0
        self.limits = EngineLimits(max_model_len=4096, max_tokens_that_fit=4096, vocab_size=_TOKENS.stop)
        self.info = EngineInfo(
            model=config.model, device="metronome", dtype="none", speculator="none", drafter="none", lookahead=0,
            kv_cache_bytes=0,
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: EngineRequest) -> None:
        self._running[request.id] = (request, 0)

    def abort(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._running.pop(seq_id, None)

    def tune(self, lookahead: int, fan_out: Sequence[int] = ()) -> None:
        """There is nothing to tune."""

    def step(self) -> list[TokenDelta]:
        now = time.monotonic()
        self._next_s = max(self._next_s + self._period_s, now)
        time.sleep(self._next_s - now)
        return [self._beat(*entry) for entry in list(self._running.values())]

    def _beat(self, request: EngineRequest, said: int) -> TokenDelta:
        self._running[request.id] = (request, said + 1)
        is_last = said + 1 == request.sampling.max_tokens
        if is_last:
            del self._running[request.id]
        return TokenDelta(
            seq_id=request.id,
            token_ids=[_TOKENS[(request.id + said) % len(_TOKENS)]],
            sources=[0],
            finish_reason="length" if is_last else None,
            stats=SequenceStats(prompt_tokens=len(request.prompt_token_ids), steps=said),
        )

    def stats(self) -> EngineStats:
        return replace(EngineStats(), running=len(self._running))

    def health(self) -> str | None:
        return None

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._running.clear()


def build(config: EngineConfig, report: Callable[[int, int], None]) -> Metronome:
    """Nothing to load."""
    return Metronome(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
