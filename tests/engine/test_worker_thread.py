"""A draft worker in a thread of the target's process: the same answers, and an error of its own that stays there."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.engine import builder
from ssd_ascend.errors import ConfigError, TransportError
from ssd_ascend.speculation import worker_link
from ssd_ascend.speculation.drafters.paged import PagedDrafter
from ssd_ascend.speculation.drafters.trunk import Trunk
from ssd_ascend.speculation.worker_link import InProcessLink
from ssd_ascend.transport.messages import Request, Shutdown
from ssd_ascend.transport.queues import QueueTransport
from tests.engine.harness import drive, greedy, make_engine, run, speculation

PROMPTS = [[5, 9, 4, 11], [7, 7, 3], [4, 8, 15, 16, 23, 9, 5]]


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ssd-draft-worker"]


@pytest.mark.parametrize("drafter", ["model", "eagle3", "ngram"])
def test_the_same_tokens_as_plain_decoding(pair: Path, drafter: str) -> None:
    plain = run(pair, PROMPTS, greedy())
    other = run(pair, PROMPTS, greedy(), speculation(pair, "ssd", drafter, worker="thread"))
    assert other.tokens == plain.tokens
    assert other.stats.speculation.drafted > 0 or drafter == "ngram"
    assert not workers(), "it leaves with its engine"


@pytest.mark.parametrize("method", ["feed", "ready"])
def test_its_error_costs_speed_only(
    pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    plain = run(pair, PROMPTS, greedy())
    engine = make_engine(pair, speculation(pair, "ssd", worker="thread"))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Trunk, method, fail)
    other = drive(engine, PROMPTS, greedy())
    assert other.tokens == plain.tokens
    assert "out of luck" in str(engine.health())
    assert [record.message for record in caplog.records].count("draft worker lost, serving without speculation") == 1
    engine.close()
    assert not workers()


def test_an_engine_that_is_not_completed_leaves_no_worker(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        seen.extend(workers())
        raise RuntimeError("out of luck")

    monkeypatch.setattr(builder, "Scheduler", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        make_engine(pair, speculation(pair, "ssd", worker="thread"))
    assert len(seen) == 1
    assert not workers()


def test_a_drafter_that_cannot_be_built_is_a_sentence(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(PagedDrafter, "__init__", fail)
    before = sys.getswitchinterval()
    with pytest.raises(ConfigError, match="did not start: RuntimeError: no room"):
        make_engine(pair, speculation(pair, "ssd", worker="thread"))
    assert not workers()
    assert sys.getswitchinterval() == before


def test_a_build_that_hangs_is_a_sentence_and_its_late_end_changes_nothing(
    pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, before = threading.Event(), sys.getswitchinterval()
    build = PagedDrafter.__init__

    def hang(*args: Any, **kwargs: Any) -> None:
        go_on.wait(60.0)
        build(*args, **kwargs)

    monkeypatch.setattr(PagedDrafter, "__init__", hang)
    monkeypatch.setattr(worker_link, "START_TIMEOUT_S", 0.25)
    with pytest.raises(ConfigError, match=r"not ready within 0\.25 s .*--worker process"):
        make_engine(pair, speculation(pair, "ssd", worker="thread"))
    assert sys.getswitchinterval() == before
    (held,) = workers()
    assert held.daemon, "whoever is held by a device must not hold the process"
    with caplog.at_level("INFO", logger="ssd_ascend"):
        go_on.set()
        held.join(60.0)
    assert not workers()
    assert "draft worker leaves: ready too late" in caplog.text
    assert "draft worker ready" not in caplog.text


def test_another_device_is_refused(pair: Path) -> None:
    with pytest.raises(ConfigError, match="on the target's device, not on"):
        make_engine(pair, speculation(pair, "ssd", worker="thread", draft_device="elsewhere"), device=None)


def test_the_line_bounds_every_wait_and_tells_of_its_end() -> None:
    ours, theirs = QueueTransport.pair()
    assert ours.recv(0.0) is None
    assert ours.recv(0.01) is None
    ours.send(Request(number=1))
    assert theirs.recv(None) == Request(number=1)
    heard: list[str] = []

    def wait() -> None:
        try:
            theirs.recv(None)
        except TransportError as error:
            heard.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    ours.close()
    waiting.join(5.0)
    assert heard == ["the line was closed by the other side"]
    for attempt in (lambda: theirs.recv(0.0), lambda: theirs.send(Shutdown()), lambda: ours.recv(0.0)):
        with pytest.raises(TransportError, match="closed by"):
            attempt()


@pytest.mark.parametrize("overlap", [True, False])
def test_left_to_us_it_is_a_thread_where_streams_overlap(
    pair: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    backend = load_backend("cpu")
    monkeypatch.setattr(builder, "load_backend", lambda name: backend)
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, streams_overlap=overlap))
    started: list[str] = []
    monkeypatch.setattr(worker_link, "_in_a_thread", lambda side: started.append("thread") or InProcessLink(side))
    monkeypatch.setattr(worker_link, "WorkerSupervisor", lambda *args, **kwargs: started.append("process") or Ready())
    make_engine(pair, speculation(pair, "ssd", worker="auto"), device="cpu").close()
    assert started == ["thread" if overlap else "process"]


class Ready:
    """A supervisor whose worker never comes into service."""

    restarts = 0

    def wait_ready(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def close(self) -> None:
        """Nothing was started."""
