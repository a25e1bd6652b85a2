"""The line from rank 0 to the others: what it costs a step, and how it ends."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_ascend.core.batch import Mode
from ssd_ascend.distributed import control
from ssd_ascend.distributed.control import Follower, Leader, gather, join
from ssd_ascend.distributed.launch import Ranks
from ssd_ascend.engine.step_message import StepWriter
from ssd_ascend.errors import ConfigError, WorkerError
from ssd_ascend.runtime.inputs import Row
from ssd_ascend.transport import tcp

ROOT = Path(__file__).parents[2]
SECRET = "a secret of the tests"
PATIENCE_S = 120.0


def until(done: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def pair_of_ends(**options: float) -> tuple[Leader, Follower]:
    with contextlib.closing(tcp.Listener("127.0.0.1", 0, SECRET)) as listener:
        found: list[Follower] = []
        thread = threading.Thread(target=lambda: found.append(join("127.0.0.1", listener.port, SECRET, 1)))
        thread.start()
        lines = gather(listener, 2, timeout_s=PATIENCE_S)
        thread.join()
    return Leader(lines, **options), found[0]  # type: ignore[arg-type]


@pytest.fixture
def silent() -> Iterator[tcp.Listener]:
    """Where one has called who does not say which rank it is: its process was stopped there. It hangs up after a while,
    so that a wait without bound ends."""
    with contextlib.closing(tcp.Listener("127.0.0.1", 0, SECRET)) as listener, contextlib.ExitStack() as cleanup:

        def call() -> None:
            line = cleanup.enter_context(tcp.connect_socket("127.0.0.1", listener.port, SECRET, timeout_s=PATIENCE_S))
            hang_up = threading.Timer(8.0, line.close)
            hang_up.start()
            cleanup.callback(hang_up.cancel)

        thread = threading.Thread(target=call)
        thread.start()
        yield listener
        thread.join()


def test_a_silent_caller_does_not_outlast_the_deadline(silent: tcp.Listener) -> None:
    with pytest.raises(WorkerError, match=r"ranks \[1\] did not join within 1 s"):
        gather(silent, 2, timeout_s=1.0)


def test_a_silent_caller_keeps_no_rank_out(silent: tcp.Listener) -> None:
    found: list[Follower] = []
    late = threading.Timer(0.5, lambda: found.append(join("127.0.0.1", silent.port, SECRET, 1)))
    late.start()
    lines = gather(silent, 2, timeout_s=PATIENCE_S)
    late.join()
    assert list(lines) == [1]
    found[0].close()
    lines[1].close()


def test_messages_arrive_and_the_end_is_told() -> None:
    leader, follower = pair_of_ends()
    leader.post(b"one")
    leader.post(bytes(100_000))
    assert follower.receive() == b"one"
    assert follower.receive() == bytes(100_000)
    leader.close()
    assert follower.receive() is None
    follower.close()
    assert leader.failure is None


def test_last_words_reach_the_leader() -> None:
    leader, follower = pair_of_ends()
    follower.fail("no room for the cache")
    until(lambda: leader.failure is not None, "the failure is heard")
    with pytest.raises(WorkerError, match="rank 1 failed: no room for the cache"):
        leader.check()
    with pytest.raises(WorkerError, match="rank 1 failed"):
        leader.post(b"step")
    follower.close()
    leader.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("kv"), "KeyError: 'kv'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("page one\npage two"), "RuntimeError: page one"),
        (ConfigError("no such file", remedy="give another"), "no such file (give another)"),
    ],
)
def test_whatever_a_rank_raises_is_told_in_one_line(error: Exception, told: str) -> None:
    leader, follower = pair_of_ends()
    with pytest.raises(SystemExit) as left, follower.telling("rank 1"):
        raise error
    assert left.value.code == 1
    until(lambda: leader.failure is not None, "the failure is heard")
    assert leader.failure == f"rank 1 failed: {told}"
    leader.close()


def test_nobody_waits_for_work_that_was_begun_after_a_loss() -> None:
    """A device that was stopped by then would run it, and wait for the lost rank."""
    leader, follower = pair_of_ends()
    ranks = Ranks(None, leader, contextlib.ExitStack())  # type: ignore[arg-type]
    with ranks.explaining():
        pass
    follower.fail("no more")
    until(lambda: leader.failure is not None, "the failure is heard")
    with pytest.raises(WorkerError, match="rank 1 failed: no more"), ranks.explaining():
        pass
    with pytest.raises(WorkerError, match="rank 1 failed: no more"), ranks.explaining():
        raise ValueError("the group is not registered")  # what torch says of one that was aborted in this moment
    follower.close()
    leader.close()


def test_a_silent_rank_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or its host cut off: no sign of life comes."""
    monkeypatch.setattr(control, "_ALIVE_EVERY_S", 0.05)
    ours, theirs = socket.socketpair()
    woken = threading.Event()
    leader = Leader({3: ours}, silence_s=0.3, on_failure=woken.set)
    assert woken.wait(PATIENCE_S)
    assert leader.failure == "rank 3 gave no sign of life for 0.3 s"
    leader.close()
    theirs.close()


def test_signs_of_life_keep_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_ALIVE_EVERY_S", 0.05)
    leader, follower = pair_of_ends(silence_s=4.0)
    time.sleep(4.5)
    assert leader.failure is None
    leader.close()
    follower.close()


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "context"), [(1, 512), (16, 2048)])
def test_a_step_is_announced_within_a_third_of_a_millisecond(rows: int, context: int) -> None:
    """From rank 0's rows to rank 1's, in another process: packing, the line, waking up, unpacking. Median.

    Every row gains 3 tokens a step, and a block when it needs one, around the context that is named.
    """
    num_steps = 300
    starts = range(context - 3 * num_steps // 2, context + 3 * num_steps // 2, 3)
    tables: list[list[int]] = [[] for _ in range(rows)]
    with contextlib.closing(tcp.Listener("127.0.0.1", 0, SECRET)) as listener:
        rank = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.control_echo", str(listener.port), SECRET],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        leader = Leader(gather(listener, 2, timeout_s=PATIENCE_S))
    began, writer = [], StepWriter()
    for start in starts:
        for table in tables:
            table += range(len(table), (start + 6) // 16 + 1)
        batch = [Row(list(range(6)), start, table, 6) for table in tables]
        began.append(time.monotonic())
        leader.post(writer.pack(Mode.VERIFY, batch))
        time.sleep(0.003)
    leader.close()
    told, _ = rank.communicate(timeout=PATIENCE_S)
    took = [1e3 * (end - start) for start, end in zip(began, json.loads(told), strict=True)]
    print(f"{rows} rows of {context}: {statistics.median(took):.3f} ms, 90 % within {sorted(took)[269]:.3f}")
    assert statistics.median(took) < 0.3
