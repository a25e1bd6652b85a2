"""A target with a remote speculator, as a program: `test_namespaces.py` runs it on a "host" of its own.

Arguments: folder of the pair, address of the speculator, number of streams, seconds. Prints one JSON object when it is
ready and one about every tenth of a second: time, hits so far, steps so far. The last line says whether every answer
was plain decoding's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ssd_ascend.core.request import EngineRequest
from ssd_ascend.engine.engine import Engine
from tests.engine.harness import drive, greedy, make_engine, prompts_of, speculation

TOKENS = 60


def main(pair: Path, address: str, streams: int, seconds: float) -> None:
    prompts = prompts_of(range(4, 4 + streams))
    options = {"max_num_seqs": streams}
    plain = make_engine(pair, **options)
    expected = drive(plain, prompts, greedy(TOKENS)).tokens
    plain.close()
    engine = make_engine(pair, speculation(pair, "ssd", speculators=(address,)), **options)
    say(engine)
    end, right, rounds = time.monotonic() + seconds, True, 0
    while time.monotonic() < end:
        right &= answers(engine, prompts, first=rounds * streams) == expected
        rounds += 1
    engine.close()
    print(json.dumps({"right": right, "rounds": rounds}), flush=True)


def answers(engine: Engine, prompts: list[list[int]], first: int) -> list[list[int]]:
    """One round of all streams; talks meanwhile."""
    for i, prompt in enumerate(prompts):
        engine.submit(EngineRequest(id=first + i, prompt_token_ids=prompt, sampling=greedy(TOKENS)))
    tokens: list[list[int]] = [[] for _ in prompts]
    said = time.monotonic()
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.seq_id - first] += delta.token_ids
        if time.monotonic() - said > 0.1:
            say(engine)
            said = time.monotonic()
    return tokens


def say(engine: Engine) -> None:
    stats = engine.stats()
    print(json.dumps({"time": time.monotonic(), "hits": stats.speculation.hits, "steps": stats.steps}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
