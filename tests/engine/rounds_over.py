"""A target and its speculator somewhere else, as a program: how long its rounds take. `test_link_delay.py` runs it.

Arguments: folder of the pair, address of the speculator, streams, trials. Prints {"round", "own"}: milliseconds of a
round, and of what the target does itself in it; the best of the trials, for the machine has other work too.
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
    found = [timed(engine, prompts, first) for first in range(0, streams * (trials + 1), streams)]
    engine.close()
    rounds, own = zip(*found[1:], strict=True)  # the first time, everything is new
    print(json.dumps({"round": min(rounds), "own": min(own)}))


def timed(engine: Engine, prompts: list[list[int]], first: int) -> tuple[float, float]:
    """(a step, the same less its wait for drafts), on average over the steps that look drafts up. Milliseconds."""
    for i, prompt in enumerate(prompts):
        engine.submit(EngineRequest(id=first + i, prompt_token_ids=prompt, sampling=greedy(TOKENS)))
    steps, own = [], []
    while engine.has_work:
        before, began = engine.stats().speculation, time.perf_counter()
        engine.step()
        step, after = 1e3 * (time.perf_counter() - began), engine.stats().speculation
        if after.lookups - before.lookups == len(prompts):
            steps.append(step)
            own.append(step - 1e3 * (after.target_wait_s - before.target_wait_s))
    return statistics.mean(steps[1:]), statistics.mean(own[1:])  # the first one asks, and waits the whole way


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
