"""A target and its speculator somewhere else, as a program: how long its rounds take. `test_link_delay.py` runs it.

Arguments: folder of the pair, address of the speculator, streams, trials. Prints {"round", "wait", "hits"}: medians, in
milliseconds, of rounds whose outcomes had all been foreseen, and how many those were.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.engine.engine import Engine
from ssd_ascend.speculation import worker_client
from tests.engine.harness import greedy, make_engine, prompts_of, speculation

TOKENS = 60


def main(pair: Path, address: str, streams: int, trials: int) -> None:
    for name in ("_PATIENCE_LEAST_S", "_PATIENCE_MOST_S"):
        assert hasattr(worker_client, name)
        setattr(worker_client, name, 10.0)  # every round waits for its answer, however busy the machine is
    engine = make_engine(pair, speculation(pair, "ssd", on_miss="decline", speculators=(address,)))
    prompts = prompts_of(range(8, 8 + streams))
    found: list[tuple[float, float]] = []
    for first in range(0, streams * (trials + 1), streams):
        on_hits = rounds_on_hits(engine, prompts, first)
        found += on_hits if first else []  # the first time, everything is new
    engine.close()
    rounds, waits = (statistics.median(column) for column in zip(*found, strict=True))
    print(json.dumps({"round": rounds, "wait": waits, "hits": len(found)}))


def rounds_on_hits(engine: Engine, prompts: list[list[int]], first: int) -> list[tuple[float, float]]:
    """(a step, the wait for drafts in it) where all sequences decode and all were foreseen. Milliseconds."""
    for i, prompt in enumerate(prompts):
        engine.submit(EngineRequest(id=first + i, prompt_token_ids=prompt, sampling=greedy(TOKENS)))
    found, was_hit = [], False
    while engine.has_work:
        before, began = engine.stats().speculation, time.perf_counter()
        engine.step()
        step, after = time.perf_counter() - began, engine.stats().speculation
        is_hit = after.hits - before.hits == len(prompts)
        if is_hit and was_hit:  # after a miss, which is not waited for, the speculator is behind
            found.append((1e3 * step, 1e3 * (after.target_wait_s - before.target_wait_s)))
        was_hit = is_hit
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
