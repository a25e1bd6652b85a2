"""A target and its speculator somewhere else, as a program: how long its rounds take. `test_link_delay.py` runs it.

Arguments: folder of the pair, address of the speculator, streams, trials, pauses in ms. Prints {"round", "own"}:
milliseconds of a round, and of what the target does itself in it; and for every pause {"own", "told"} of a target that
waits: "told" is how long after an outcome its guesses are there. The best of the trials: the machine has other work.
Verification takes longer than drafting here, as plans have it: a target that asks sooner has its drafts cut short.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.engine.engine import Engine
from ssd_ascend.speculation import worker_client
from tests.engine.harness import greedy, make_engine, prompts_of, speculation

TOKENS = 60
VERIFY_S = 0.01
"""What a larger target would take: this one idles so long."""
GIVEN_UP_S = 1.0


class Trial(NamedTuple):
    """Of one answer to every prompt, in milliseconds; see `_typical`."""

    round: float
    own: float
    told: float


class Rounds:
    """Runs trials; each is an answer of `TOKENS` tokens to every prompt."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self._engine = engine
        self._prompts = prompts_of(range(8, 8 + streams))
        self._client: Any = engine._speculator._worker  # type: ignore[attr-defined]
        self._next_id = 0
        self._posted_s = 0.0
        executor: Any = engine._executor
        self._post, self._forward = self._client.post, executor.forward
        self._client.post, executor.forward = self._stamped, self._slow_forward

    def _stamped(self, *args: Any) -> None:
        self._posted_s = time.monotonic()
        self._post(*args)

    def _slow_forward(self, *args: Any) -> Any:
        time.sleep(VERIFY_S)
        return self._forward(*args)

    def trial(self, pause_s: float | None = None) -> Trial:
        """With a pause the target waits in every step until the worker has told all that follows the one before, so
        that no request cuts its drafting short; and so much longer in every second one, for who has idled works more
        slowly. `told` says nothing without."""
        for prompt in self._prompts:
            request = EngineRequest(id=self._next_id, prompt_token_ids=prompt, sampling=greedy(TOKENS))
            self._engine.submit(request)
            self._next_id += 1
        rounds, own, told = [], [], []
        while self._engine.has_work:
            before, began = self._engine.stats().speculation, time.monotonic()
            self._engine.step()
            took, after = 1e3 * (time.monotonic() - began), self._engine.stats().speculation
            whole = after.lookups - before.lookups == len(self._prompts)
            if pause_s is not None:
                self._client.listen(time.monotonic() + GIVEN_UP_S)
                whole &= self._client._told == self._client._number
                told += [1e3 * (self._client._last_heard_s - self._posted_s)] * whole
                time.sleep(pause_s * (len(told) % 2))
            rounds += [took] * whole
            own += [took - 1e3 * (after.target_wait_s - before.target_wait_s)] * whole
        return Trial(*(_typical(of) for of in (rounds, own, told or rounds)))


def _typical(steps: list[float]) -> float:
    """The median of what two steps in a row take each, for two rounds share a way: one waits long, the next is short.
    Without the first step, which asks, and waits the whole way. Infinite where a busy machine left no two steps."""
    pairs = [(one + other) / 2.0 for one, other in itertools.pairwise(steps[1:])]
    return statistics.median(pairs) if pairs else math.inf


def _best(trials: list[Trial], *names: str) -> dict[str, float]:
    return {name: min(getattr(one, name) for one in trials) for name in names}


def main(pair: Path, address: str, streams: int, trials: int, pauses_ms: list[str]) -> None:
    for name in ("_PATIENCE_LEAST_S", "_PATIENCE_MOST_S"):
        assert hasattr(worker_client, name)
        setattr(worker_client, name, 10.0)  # every round waits for its answer, however busy the machine is
    engine = make_engine(pair, speculation(pair, "ssd", on_miss="decline", speculators=(address,)))
    rounds = Rounds(engine, streams)
    rounds.trial()  # the first time, everything is new
    found: dict[str, Any] = _best([rounds.trial() for _ in range(trials)], "round", "own")
    for pause in pauses_ms:
        found[pause] = _best([rounds.trial(float(pause) / 1e3) for _ in range(trials)], "own", "told")
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
