"""kill -9 and a clock that jumps, at a real engine with a real draft worker, while streams run.

Slow; `test_life.py` and `tests/engine/test_faults.py` hold the parts to the same in the fast suite.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import TEMPLATE
from tests.serve.live import PATIENCE_S, LiveServer, eventually
from tests.structured.models import EOS, write_bytes_pair
from tests.unit.text_toys import byte_level_backend, write_directory

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
RUNNING = 4
LONG: dict[str, Any] = {"max_tokens": 480, "temperature": 0, "ignore_eos": True}
DAY_S = 86_400


class Clock:
    """The wall clock of the server's processes."""

    def __init__(self, folder: Path) -> None:
        self.library, self._file = folder / "clock.so", folder / "offset"
        source = Path(__file__).with_name("jumping_clock.cpp")
        compiler = shutil.which("g++")
        assert compiler is not None, "the CPU backend needs g++ as well"
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(self.library), "-ldl"], check=True, timeout=120
        )
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Be off by so much from now on."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:  # the same file: it is mapped
            file.write(struct.pack("=q", seconds))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "JUMPING_CLOCK": str(self._file)}


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def live(clock: Clock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    pair = write_bytes_pair(tmp_path_factory.mktemp("pair"))
    write_directory(pair / "target", byte_level_backend(), eos_token=EOS, chat_template=TEMPLATE)
    flags = ["--model", str(pair / "target"), "--draft", str(pair / "model"), "--speculator", "ssd", "--lookahead", "3"]
    flags += ["--num-kv-blocks", "256", "--max-num-seqs", str(RUNNING), "--threads", "1", "--draft-threads", "1"]
    flags += ["--dtype", "float32", "--device", "cpu", "--max-restarts", "9", "--rate-limit", "600"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        started = LiveServer(*flags, module="ssd_ascend.serve")
    with started:
        yield started.wait_until_ready()
        started.wait_until_idle()
        assert started.stop() == 0


@pytest.fixture(scope="module")
def expected(live: LiveServer) -> list[str]:
    """What each prompt's answer is on a good day."""
    return [str(live.post(COMPLETIONS, {**LONG, "prompt": f"<{i}> "}).json()["choices"][0]["text"]) for i in range(10)]


class Streams:
    """Requests under way, each read in a thread of its own."""

    def __init__(self, live: LiveServer, numbers: range) -> None:
        self.events: dict[int, list[Any]] = {number: [] for number in numbers}
        self._threads = [threading.Thread(target=self._read, args=(live, number)) for number in numbers]
        for thread in self._threads:
            thread.start()

    def _read(self, live: LiveServer, number: int) -> None:
        for event in live.events(COMPLETIONS, {**LONG, "prompt": f"<{number}> "}):
            self.events[number].append(event)

    def wait_until_begun(self) -> None:
        eventually(lambda: all(len(events) > 2 for events in self.events.values()), "all stream")

    def texts(self) -> dict[int, str | None]:
        """The whole answers, when all have ended; None for one that ended with an error."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return {
            number: "".join(event["choices"][0]["text"] for event in events[:-1]) if events[-1] == "[DONE]" else None
            for number, events in self.events.items()
        }


def child_of(pid: int) -> int:
    """The one child process of a process, whichever of its threads started it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (child,) = {int(word) for task in tasks for word in (task / "children").read_text().split()}
    return child


def test_a_killed_worker_costs_no_token(live: LiveServer, expected: list[str]) -> None:
    before = live.metric("ssd_speculator_restarts_total")
    worker = child_of(live.engine_pid())
    streams = Streams(live, range(RUNNING))
    streams.wait_until_begun()
    os.kill(worker, signal.SIGKILL)
    assert streams.texts() == dict(enumerate(expected[:RUNNING]))
    eventually(lambda: live.metric("ssd_speculator_restarts_total") > before, "another worker is started")

    def drafts_again() -> bool:
        usage = live.post(COMPLETIONS, {**LONG, "max_tokens": 40, "prompt": "<0> "}).json()["usage"]
        return bool(usage["completion_tokens_details"]["accepted_prediction_tokens"])

    eventually(drafts_again, "it drafts")
    assert live.get("/health").json()["status"] == "ready"


def test_a_killed_engine_loses_nothing_that_had_not_begun(live: LiveServer, expected: list[str]) -> None:
    engine = live.engine_pid()
    begun = Streams(live, range(RUNNING))
    begun.wait_until_begun()
    queued = Streams(live, range(RUNNING, len(expected)))
    eventually(lambda: live.metric("ssd_requests_waiting") == len(expected) - RUNNING, "the others wait")
    os.kill(engine, signal.SIGKILL)
    assert begun.texts() == dict.fromkeys(range(RUNNING))
    assert all(events[-1]["error"]["type"] == "server_error" for events in begun.events.values())
    assert live.post(COMPLETIONS, {"prompt": "x"}).status_code == 503  # at once, while another engine starts
    assert queued.texts() == dict(list(enumerate(expected))[RUNNING:])
    assert live.engine_pid() != engine


def test_a_clock_that_jumps_is_not_noticed(live: LiveServer, expected: list[str], clock: Clock) -> None:
    """By an hour, a day forth and two back, in the middle of answers: streams, deadlines, limits, workers go on."""
    count, total = (live.metric(f"ssd_answer_seconds_{name}") for name in ("count", "sum"))
    restarts = live.metric("ssd_speculator_restarts_total")
    created = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).json()["created"]
    for seconds in (3600, DAY_S, -2 * DAY_S, 0):
        streams = Streams(live, range(RUNNING))
        streams.wait_until_begun()
        clock.jump(seconds)
        assert streams.texts() == dict(enumerate(expected[:RUNNING]))
        told = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert told.status_code == 200
        assert abs(told.json()["created"] - created - seconds) < 600  # the wall clock is only told
    assert live.metric("ssd_speculator_restarts_total") == restarts
    answers = live.metric("ssd_answer_seconds_count") - count
    assert 0 < live.metric("ssd_answer_seconds_sum") - total < answers * PATIENCE_S
    assert live.get("/health").json()["status"] == "ready"
