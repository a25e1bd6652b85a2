"""A slow cable between target and speculator costs what the planner says: round and message times, within 20 %."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_ascend import catalogue
from ssd_ascend.planner.cost import Cost, Load
from ssd_ascend.planner.rates import rates_of
from ssd_ascend.planner.shapes import Shape
from ssd_ascend.speculation import worker_client
from tests.engine.harness import drive, greedy, make_engine, prompts_of, speculation
from tests.engine.test_remote_speculators import SECRET, Running, speculator

ROOT = Path(__file__).parents[2]
DELAYS_MS = (1.0, 5.0, 20.0)
TINY = Shape(
    layers=4, hidden=32, vocab=24, heads=4, kv_heads=2, intermediate=48, dtype="float32", dtype_bytes=4,
    step_params=30_000, resident_params=30_000, kv_bytes_per_token=512,
)  # fmt: skip
STREAMS, TOKENS, TRIALS = 4, 60, 6


@contextmanager
def cable(service: Running, delay_ms: float) -> Iterator[str]:
    """An address that leads to the service through a cable with this delay."""
    relay = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.delay_relay", str(service.port), str(delay_ms)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert relay.stdout is not None
        yield f"127.0.0.1:{int(relay.stdout.readline())}"
    finally:
        relay.terminate()
        relay.wait()


def measured(pair: Path, address: str) -> tuple[float, float]:
    """(a round, waiting for the message) in ms: the best of a few trials, for the machine has other work too."""
    engine = make_engine(pair, speculation(pair, "ssd", on_miss="decline", speculators=(address,)))
    rounds, waits = [], []
    try:
        drive(engine, prompts_of(range(8, 8 + STREAMS)), greedy(TOKENS))
        for _ in range(TRIALS):
            before, began = engine.stats(), time.perf_counter()
            waited = before.speculation.target_wait_s
            drive(engine, prompts_of(range(8, 8 + STREAMS)), greedy(TOKENS))
            after = engine.stats()
            steps = after.steps - before.steps
            rounds.append(1e3 * (time.perf_counter() - began) / steps)
            waits.append(1e3 * (after.speculation.target_wait_s - waited) / steps)
    finally:
        engine.close()
    return min(rounds), min(waits)


def measured_over(pair: Path, service: Running, delay_ms: float) -> tuple[float, float]:
    with cable(service, delay_ms) as address:
        return measured(pair, address)


def predicted_message_ms(delay_ms: float) -> float:
    """The planner's message time over a link of this latency; the models are too small to matter."""
    rates = rates_of(catalogue.find_topology("laptop-cpu"), "float32")
    links = {name: replace(link, latency_us=1e3 * delay_ms) for name, link in rates.links.items()}
    load = Load(
        batch=STREAMS, context=64, lookahead=4, width=10, sampled=False, acceptance=0.5, hit_rate=0.5
    )  # fmt: skip
    cost = Cost(target=TINY, draft=TINY, rates=replace(rates, links=links), load=load, tp=1, tp_level="node")
    return cost.message(TINY, 1, "node").us / 1e3


@pytest.mark.slow
def test_rounds_over_a_slow_cable(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_SPECULATOR_SECRET", SECRET)
    for name in ("_PATIENCE_LEAST_S", "_PATIENCE_MOST_S"):
        monkeypatch.setattr(worker_client, name, 10.0)  # every round waits for its answer, however busy the machine is
    with speculator(pair, on_miss="decline") as service:
        found = {delay: measured_over(pair, service, delay) for delay in (0.0, *DELAYS_MS)}
        again = measured_over(pair, service, 0.0)  # a machine that was busy the first time
    base_round, base_wait = (min(both) for both in zip(found.pop(0.0), again, strict=True))
    for delay, (a_round, a_wait) in found.items():
        more = predicted_message_ms(delay) - predicted_message_ms(0.0)
        print(
            f"{delay:g} ms: round {a_round:.2f} ms, predicted {base_round + more:.2f}; "
            f"message {a_wait:.2f} ms, predicted {base_wait + more:.2f}"
        )
        assert a_round == pytest.approx(base_round + more, rel=0.2)
        assert a_wait == pytest.approx(base_wait + more, rel=0.2)
