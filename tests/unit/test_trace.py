"""Spans: nothing when off, counts and nanoseconds when on, from every thread, exceptions included."""

from __future__ import annotations

import os
import threading
import time

import pytest

from ssd_ascend import trace


def test_off_records_nothing_and_allocates_nothing() -> None:
    assert trace.span("a") is trace.span("b")
    with trace.span("a"):
        pass
    assert trace.summary() == {}


def test_on_counts_and_times_by_name() -> None:
    trace.enable()
    assert trace.enabled()
    for _ in range(3):
        with trace.span("outer"), trace.span("inner"):
            pass
    stats = trace.summary()
    assert {name: entry.count for name, entry in stats.items()} == {"outer": 3, "inner": 3}
    for entry in stats.values():
        assert 0 < entry.max_ns <= entry.total_ns <= 3 * entry.max_ns
        assert entry.mean_ms == pytest.approx(entry.total_ns / 3e6)
    assert stats["inner"].total_ns <= stats["outer"].total_ns


def test_an_exception_is_timed_and_passes() -> None:
    trace.enable()
    with pytest.raises(KeyError), trace.span("broken"):
        raise KeyError("x")
    assert trace.summary()["broken"].count == 1


def test_disable_keeps_and_reset_forgets() -> None:
    trace.enable()
    with trace.span("a"):
        trace.disable()
    with trace.span("a"):
        pass
    assert trace.summary()["a"].count == 1
    trace.reset()
    assert trace.summary() == {}


def test_threads_lose_no_span() -> None:
    trace.enable()

    def work() -> None:
        for _ in range(500):
            with trace.span("shared"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.summary()["shared"].count == 2000


def test_the_processor_time_of_a_process() -> None:
    before = trace.cpu_seconds(os.getpid())
    assert before is not None
    spent = time.process_time() + 0.1
    while time.process_time() < spent:
        pass
    after = trace.cpu_seconds(os.getpid())
    assert after is not None
    assert after - before > 0.05
    assert trace.cpu_seconds(1 << 30) is None
