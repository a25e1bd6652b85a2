"""A slow cable between target and speculator costs what the planner says: rounds and waits, within 20 %.

Once between two "hosts", network namespaces whose cable holds every packet back, and once, where namespaces are not
permitted, through a relay that holds bytes back.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend import catalogue
from ssd_ascend.planner.cost import Cost, Load, told_ahead_us
from ssd_ascend.planner.rates import rates_of
from ssd_ascend.planner.shapes import Shape
from tests import two_hosts
from tests.engine.test_remote_speculators import speculator

DELAYS_MS = (1.0, 5.0, 20.0)
TINY = Shape(
    layers=4, hidden=32, vocab=24, heads=4, kv_heads=2, intermediate=48, dtype="float32", dtype_bytes=4,
    step_params=30_000, resident_params=30_000, kv_bytes_per_token=512,
)  # fmt: skip
STREAMS, TRIALS = 2, 6
JITTER_MS = 2.0
"""Where hardly any wait is predicted, a round waits that comes a little early."""
FLAGS = ["--dtype", "float32", "--speculator", "ssd", "--drafter", "model", "--lookahead", "4", "--fan-out", "2"]
Measure = Callable[[Path, float], AbstractContextManager[subprocess.Popen[str]]]


def command(pair: Path, address: str, delay_ms: float) -> list[str]:
    pauses = [] if delay_ms else [str(pause_of(delay)) for delay in DELAYS_MS]
    return ["-m", "tests.engine.rounds_over", str(pair), address, str(STREAMS), str(TRIALS), *pauses]


def pause_of(delay_ms: float) -> float:
    """For so long both sides idle in every second round over such a cable: the way there and back."""
    return 2.0 * delay_ms


@contextmanager
def between_hosts(pair: Path, delay_ms: float) -> Iterator[subprocess.Popen[str]]:
    """A target on one host, its speculator on the other."""
    flags = ["--model", str(pair / "target"), "--draft", str(pair / "model"), *FLAGS, "--on-miss", "decline"]
    where = ["--host", two_hosts.THERE, "--port", str(two_hosts.PORT)]
    with (
        two_hosts.two_hosts(delay_ms),
        two_hosts.running(two_hosts.SPECULATOR, "-m", "ssd_ascend.speculate", *flags, *where) as service,
    ):
        assert service.stdout is not None
        assert service.stdout.readline().startswith("ready")
        with two_hosts.running(
            two_hosts.TARGET, *command(pair, f"{two_hosts.THERE}:{two_hosts.PORT}", delay_ms)
        ) as target:
            yield target


@contextmanager
def through_a_relay(pair: Path, delay_ms: float) -> Iterator[subprocess.Popen[str]]:
    """A target and its speculator on this host, and a relay between them."""
    with speculator(pair, on_miss="decline") as service:
        relay = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.delay_relay", str(service.port), str(delay_ms)],
            cwd=two_hosts.ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert relay.stdout is not None
        target = subprocess.Popen(
            [sys.executable, *command(pair, f"127.0.0.1:{int(relay.stdout.readline())}", delay_ms)],
            env=two_hosts.ENVIRONMENT, cwd=two_hosts.ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield target
        finally:
            for process in (target, relay):
                process.terminate()
                process.wait()


def measured(how: Measure, pair: Path, delay_ms: float) -> dict[str, Any]:
    """What `rounds_over` found, in ms."""
    with how(pair, delay_ms) as target:
        report, _ = target.communicate(timeout=300.0)
    found: dict[str, Any] = json.loads(report)
    return found


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
@pytest.mark.parametrize("how", [between_hosts, through_a_relay])
def test_rounds_over_a_slow_cable(how: Measure, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_SPECULATOR_SECRET", two_hosts.ENVIRONMENT["SSD_SPECULATOR_SECRET"])
    found = {delay: measured(how, pair, delay) for delay in (0.0, *DELAYS_MS)}
    quick, again = found.pop(0.0), measured(how, pair, 0.0)  # a machine that was busy the first time
    wrong = []
    for delay, each in found.items():
        pause = str(pause_of(delay))
        own, told = (min(one[pause][name] for one in (quick, again)) for name in ("own", "told"))
        predicted = told_ahead_us(own, told - predicted_message_ms(0.0), predicted_message_ms(delay))
        waits = {"round": (each["round"], predicted), "wait": (each["round"] - each["own"], predicted - own)}
        print(f"{delay:g} ms: own work {own:.2f} ms, guesses are told after {told:.2f}")
        for what, (took, expected) in waits.items():
            print(f"{delay:g} ms: {what} {took:.2f} ms, predicted {expected:.2f}")
            if took != pytest.approx(expected, rel=0.2, abs=JITTER_MS if what == "wait" else 0.0):
                wrong.append((delay, what, took, expected))
    assert not wrong
