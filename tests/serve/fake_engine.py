"""A parrot in place of a model: it says its prompt over and over, several tokens a step, in a process of its own.

Words in the prompt make it misbehave: SLOW (20 ms a step), FAIL (the sequence fails), CRASH (the step raises), KILL
(the process is killed), FAULT (by itself), HANG (the step does not end), LOST (a worker is lost), REFUSE (as for a
grammar that cannot begin), BALK (as for one that
cannot go on). Between SAY[ and ]YAS stands what it says instead, once; to SEED, the seed of its request.
All around it is the real thing: process, line, front end, HTTP.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest, SequenceStats, TokenDelta
from ssd_ascend.core.speculation import TokenLogprobs
from ssd_ascend.core.stats import EngineStats, SpeculationStats
from ssd_ascend.engine.identity import EngineInfo, EngineLimits
from ssd_ascend.engine.process import main
from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text import Tokenizer

LOOKAHEAD = 3
MAX_RUNNING = 4
MAX_MODEL_LEN = 2048
BLOCK = 16


@dataclass
class Bird:
    """One sequence."""

    request: EngineRequest
    text: str
    speech: list[int]
    said: list[int] = field(default_factory=list)
    stats: SequenceStats = field(default_factory=SequenceStats)


class ParrotEngine:
    """The seam of `engine/engine.py`, without a model."""

    def __init__(self, config: EngineConfig) -> None:
        self._tokenizer = Tokenizer.load(config.model)
        self._eos = self._tokenizer.eos_ids
        self._birds: dict[int, Bird] = {}
        self._stats = EngineStats(kv_blocks_total=1000)
        self._lost = False
        self._lookahead = LOOKAHEAD
        self.limits = EngineLimits(
            max_model_len=MAX_MODEL_LEN, max_tokens_that_fit=MAX_MODEL_LEN, vocab_size=self._tokenizer.vocab_size
        )
        self.info = EngineInfo(
            model=config.model,
            device="parrot (emulated)",
            dtype="int64",
            speculator="ssd",
            drafter="parrot",
            lookahead=LOOKAHEAD,
            kv_cache_bytes=0,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._birds)

    def submit(self, request: EngineRequest) -> None:
        assert request.sampling.seed is not None
        text = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        if "REFUSE" in text:
            raise RequestError("the parrot will not say that", param="grammar", code="unspeakable", remedy="say please")
        stats = SequenceStats(prompt_tokens=len(request.prompt_token_ids), cached_tokens=1)
        speech = request.prompt_token_ids
        if "SAY[" in text:
            speech = self._script(text.rpartition("SAY[")[2].partition("]YAS")[0])
        elif "SEED" in text:
            speech = self._script(str(request.sampling.seed))
        self._birds[request.id] = Bird(request, text, speech, stats=stats)
        self._stats.prompt_tokens += len(request.prompt_token_ids)

    def _script(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self._eos]

    def abort(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._birds.pop(seq_id, None)

    def tune(self, lookahead: int, fan_out: Sequence[int] = ()) -> None:
        self._lookahead = lookahead

    def step(self) -> list[TokenDelta]:
        self._stats.steps += 1
        running = list(self._birds.values())[:MAX_RUNNING]
        if any("SLOW" in bird.text for bird in running):
            time.sleep(0.02)
        return [self._say(bird) for bird in running]

    def stats(self) -> EngineStats:
        used = sum(-(-(len(b.request.prompt_token_ids) + len(b.said)) // BLOCK) for b in self._birds.values())
        return replace(
            self._stats,
            running=min(len(self._birds), MAX_RUNNING),
            waiting=max(0, len(self._birds) - MAX_RUNNING),
            kv_blocks_used=used,
        )

    def health(self) -> str | None:
        return "the speculator's worker is lost" if self._lost else None

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._birds.clear()

    def _say(self, bird: Bird) -> TokenDelta:
        params, speech = bird.request.sampling, bird.speech
        self._misbehave(bird)
        if "BALK" in bird.text and len(bird.said) > (LOOKAHEAD if "LATE" in bird.text else 0):
            del self._birds[bird.request.id]
            reason = "the grammar cannot be followed: it balks"
            return TokenDelta(seq_id=bird.request.id, token_ids=[], finish_reason="error", error=reason, refused=True)
        if "FAIL" in bird.text and bird.said:
            del self._birds[bird.request.id]
            return TokenDelta(seq_id=bird.request.id, token_ids=[], finish_reason="error", error="the parrot choked")
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos)
        tokens: list[int] = []
        reason, stop_token = None, None
        is_first = not bird.said
        lookahead = self._lookahead if params.speculation else 0
        for _ in range(1 if is_first else lookahead + 1):
            token = speech[len(bird.said) % len(speech)]
            bird.said.append(token)
            tokens.append(token)
            if token in stop_ids and len(bird.said) > params.min_tokens:
                reason, stop_token = "stop", token
            elif len(bird.said) == params.max_tokens:
                reason = "length"
            if reason:
                break
        self._count(bird, len(tokens), drafted=0 if is_first else lookahead)
        if reason:
            del self._birds[bird.request.id]
        return TokenDelta(
            seq_id=bird.request.id,
            token_ids=tokens,
            logprobs=None if params.logprobs is None else [_logprobs(token, params.logprobs) for token in tokens],
            sources=[0] if is_first else [2] * min(len(tokens), lookahead) + [0] * (len(tokens) - lookahead),
            finish_reason=reason,
            stop_token=stop_token,
            stats=bird.stats,
        )

    def _misbehave(self, bird: Bird) -> None:
        self._lost = self._lost or "LOST" in bird.text
        if len(bird.said) > 2 * LOOKAHEAD:
            if "KILL" in bird.text:
                os.kill(os.getpid(), signal.SIGKILL)
            if "FAULT" in bird.text:
                os.kill(os.getpid(), signal.SIGSEGV)
            if "HANG" in bird.text:
                time.sleep(1e6)
            if "CRASH" in bird.text:
                raise ZeroDivisionError("a bug of the parrot")

    def _count(self, bird: Bird, count: int, *, drafted: int) -> None:
        self._stats.generation_tokens += count
        if not drafted:
            return
        accepted = min(count, drafted)
        old, total = bird.stats, self._stats.speculation
        bird.stats = replace(
            old,
            steps=old.steps + 1,
            drafted=old.drafted + drafted,
            accepted=old.accepted + accepted,
            lookups=old.lookups + 1,
            hits=old.hits + 1,
        )
        self._stats.speculation = SpeculationStats(
            verify_rows=total.verify_rows + 1,
            drafted=total.drafted + drafted,
            accepted=total.accepted + accepted,
            accepted_per_position=[total.accepted + accepted, 0, 0],
            drafted_per_position=[total.drafted + drafted, 0, 0],
            lookups=total.lookups + 1,
            hits=total.hits + 1,
            hit_tokens=total.hit_tokens + count,
            worker_alive=not self._lost,
        )


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """The parrot is fairly sure; its second choice is the next token of the vocabulary, its third is impossible."""
    top = ((token, -0.25), (token + 1, -1.5), (token + 2, float("-inf")))
    return TokenLogprobs(token, -0.25, 1, top[:num_top])


def build(config: EngineConfig, report: Callable[[int, int], None]) -> ParrotEngine:
    """A parrot; one whose directory is called "broken" cannot be built, one called "slow" takes a while, and of those
    to come from one with a file "stillborn" as many as it says die as they are built."""
    stillborn = Path(config.model, "stillborn")
    if stillborn.exists() and (left := int(stillborn.read_text())):
        stillborn.write_text(str(left - 1))
        raise ConfigError(f"the egg was empty, {left - 1} more are")
    if config.model.endswith("broken"):
        raise ConfigError("the parrot is dead", remedy="get another parrot")
    if config.model.endswith("slow"):
        for done in range(10):
            report(done, 10)
            time.sleep(0.2)
    return ParrotEngine(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
