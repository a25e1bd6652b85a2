"""Speculators as services: one for several targets, several for one, coming and going. Tokens are plain decoding's.

The services run in threads of this process, over real sockets on 127.0.0.1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.core.request import EngineRequest
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.speculator import open_service
from ssd_ascend.errors import ConfigError
from ssd_ascend.speculation import remote_link
from ssd_ascend.speculation.service import SpeculatorService
from tests.engine.harness import DTYPE, drive, greedy, make_engine, prompts_of, run, speculation

SECRET = "a secret of the tests"
PROMPTS = prompts_of([1, 5, 17, 33, 16, 9])
PATIENCE_S = 90.0
"""For what takes milliseconds on a machine that is not busy."""


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_SPECULATOR_SECRET", SECRET)


@dataclass
class Running:
    """A service and where it is."""

    service: SpeculatorService
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def speculator(pair: Path, drafter: str = "model", *, port: int = 0, **options: Any) -> Iterator[Running]:
    """A service in a thread, until the end of the block."""
    config = EngineConfig(
        model=str(pair / "target"), device="cpu", dtype=DTYPE, max_num_seqs=8, max_batched_tokens=256,
        speculation=speculation(pair, "ssd", drafter, **options),
    )  # fmt: skip
    service, address = open_service(config, "127.0.0.1", port)
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield Running(service, address)
    finally:
        service.stop()
        thread.join()


def remote(pair: Path, *services: Running, drafter: str = "model", **options: Any) -> Any:
    """A target's configuration with these speculators."""
    return speculation(pair, "ssd", drafter, speculators=tuple(s.address for s in services), **options)


def submit(engine: Engine, count: int = 6, tokens: int = 200) -> None:
    for i, prompt in enumerate(prompts_of(range(3, 3 + count))):
        engine.submit(EngineRequest(id=i, prompt_token_ids=prompt, sampling=greedy(tokens)))


def hits(engine: Engine) -> int:
    return engine.stats().speculation.hits


def step_until(engine: Engine, done: Any, what: str) -> None:
    """Step (with new work, when all is answered) until `done()`."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"{what} within {PATIENCE_S} s"
        if not engine.has_work:
            submit(engine)
        engine.step()


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
def test_two_targets_share_a_speculator(pair: Path, drafter: str) -> None:
    plain = run(pair, PROMPTS, greedy(40))
    with speculator(pair, drafter) as service:
        config = remote(pair, service, drafter=drafter)
        engines = [make_engine(pair, config) for _ in range(2)]
        found: list[Any] = [None, None]

        def work(index: int) -> None:
            found[index] = drive(engines[index], PROMPTS, greedy(40))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for engine, result in zip(engines, found, strict=True):
            assert result.tokens == plain.tokens
            step_until(engine, lambda engine=engine: engine.stats().speculation.drafted > 0, "drafts")
            engine.close()
        deadline = time.monotonic() + PATIENCE_S
        while service.service.num_guests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert service.service.num_guests == 0


def test_a_target_uses_two_speculators_and_outlives_either(pair: Path) -> None:
    """Both get sequences; one goes, the other takes all; one comes back under the same address, and is used again."""
    plain = run(pair, PROMPTS, greedy(40))
    with speculator(pair) as stays:
        with speculator(pair) as goes:
            engine = make_engine(pair, remote(pair, stays, goes))
            assert drive(engine, PROMPTS, greedy(40)).tokens == plain.tokens
            pool: Any = engine._speculator._worker  # type: ignore[attr-defined]
            submit(engine)
            step_until(engine, lambda: all(len(c.attached) > 1 for c in pool._clients), "both speculators used")
            assert engine.health() is None
        step_until(engine, lambda: pool._clients[1].stats.worker_alive is False, "the loss noticed")
        assert "1 of 2 speculators" in str(engine.health())
        before = hits(engine)
        step_until(engine, lambda: hits(engine) > before + 3, "the one that is left hits")
        with speculator(pair, port=goes.port):
            step_until(engine, lambda: len(pool._clients[1].attached) > 1, "the newcomer used")
            assert engine.health() is None
            while engine.has_work:
                engine.step()
            assert drive(engine, PROMPTS, greedy(40)).tokens == plain.tokens
        engine.close()


def test_a_target_hears_how_long_its_speculator_idles(pair: Path) -> None:
    """By that it knows whether a step may be told a little later, and the metrics say whether drafting is hidden."""
    with speculator(pair) as service:
        engine = make_engine(pair, remote(pair, service))
        idle_s, deadline = 0.0, time.monotonic() + PATIENCE_S
        while idle_s < 0.15:  # on a busy machine it may begin to wait long after we have
            assert time.monotonic() < deadline, f"it was told of {idle_s} s only"
            drive(engine, PROMPTS, greedy(10))
            before = engine.stats().speculation.draft_idle_s
            time.sleep(0.2)
            drive(engine, PROMPTS, greedy(10))
            idle_s = engine.stats().speculation.draft_idle_s - before
        engine.close()


def test_five_speculators_share_one_targets_sequences(pair: Path) -> None:
    """Beyond four: each sequence is with one of them, all are used, and tokens stay plain decoding's."""
    plain = run(pair, PROMPTS, greedy(40))
    with ExitStack() as stack:
        services = [stack.enter_context(speculator(pair)) for _ in range(5)]
        engine = make_engine(pair, remote(pair, *services))
        try:
            assert drive(engine, PROMPTS, greedy(40)).tokens == plain.tokens
            pool: Any = engine._speculator._worker  # type: ignore[attr-defined]
            submit(engine)
            step_until(engine, lambda: all(client.attached for client in pool._clients), "all five used")
            held = [set(client.attached) for client in pool._clients]
            assert sum(map(len, held)) == len(set().union(*held))
        finally:
            engine.close()


def test_a_speculator_may_come_after_the_target(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "_FIRST_S", 0.1)
    with speculator(pair) as probe:
        port = probe.port
    engine = make_engine(pair, speculation(pair, "ssd", speculators=(f"127.0.0.1:{port}",)))
    try:
        assert "no speculation from" in str(engine.health())
        with speculator(pair, port=port):
            step_until(engine, lambda: hits(engine) > 0, "speculation")
            assert engine.health() is None
    finally:
        engine.close()


def test_what_does_not_fit_is_refused_with_both_values(pair: Path, pairs: dict[str, Path]) -> None:
    with speculator(pair, lookahead=3) as service:
        with pytest.raises(ConfigError, match="the target has lookahead 4, the speculator 3"):
            make_engine(pair, remote(pair, service))
        with pytest.raises(ConfigError, match=r"the target has target 'qwen3, .*', the speculator 'llama, "):
            make_engine(pairs["qwen3"], remote(pair, service, lookahead=3))
        with pytest.raises(ConfigError, match="the target has drafter 'eagle3', the speculator 'model'"):
            make_engine(pair, remote(pair, service, drafter="eagle3", lookahead=3))


def test_another_secret_gets_nobody_in(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "_FIRST_S", 1.0)
    with speculator(pair) as service:
        monkeypatch.setenv("SSD_SPECULATOR_SECRET", SECRET[::-1])
        engine = make_engine(pair, remote(pair, service))
        try:
            assert "did not let us in" in str(engine.health())
            assert service.service.num_guests == 0
            assert len(drive(engine, PROMPTS[:2], greedy(5)).tokens) == 2
        finally:
            engine.close()


@pytest.mark.parametrize("secret", [None, "short"])
def test_a_secret_is_required(pair: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    if secret is None:
        monkeypatch.delenv("SSD_SPECULATOR_SECRET")
    else:
        monkeypatch.setenv("SSD_SPECULATOR_SECRET", secret)
    with pytest.raises(ConfigError, match="SSD_SPECULATOR_SECRET is"):
        make_engine(pair, speculation(pair, "ssd", speculators=("127.0.0.1:7070",)))


@pytest.mark.parametrize("address", ["127.0.0.1", ":7070", "host:x", "host:70000"])
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a speculator"):
        speculation(Path(), "ssd", speculators=(address,))
    with pytest.raises(ConfigError, match="add --speculator ssd"):
        speculation(Path(), "sd", speculators=("127.0.0.1:7070",))
