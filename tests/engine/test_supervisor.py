"""A draft worker in a real process: started, killed, stopped, ill-mannered; and nothing of it is left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.errors import ConfigError, TransportError
from ssd_ascend.speculation.supervisor import RestartPolicy, WorkerState, WorkerSupervisor, introduced
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.link import Link, make_link
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello, Shutdown
from tests.engine import workers
from tests.unit.plain_messages import answer, request, same

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 300.0
"""What nothing here takes, on the slowest machine either: processes that start with torch are among it."""
QUICK = RestartPolicy(first_pause_s=0.02, longest_pause_s=0.2, grace_s=5.0)
Start = Callable[..., WorkerSupervisor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts supervisors; afterwards none of their processes may live."""
    started: list[WorkerSupervisor] = []

    def begin(worker: str, policy: RestartPolicy = QUICK, **options: Any) -> WorkerSupervisor:
        config = {"lookahead": 5, **options.pop("config", {})}
        entry = worker if ":" in worker else f"tests.engine.workers:{worker}"
        started.append(WorkerSupervisor(entry, config, policy=policy, **options))
        return started[-1]

    yield begin
    for supervisor in started:
        supervisor.close()
        assert supervisor.state is WorkerState.CLOSED
        assert supervisor.pid is None
        assert supervisor.current() is None


def eventually(condition: Callable[[], bool], timeout_s: float = LONG_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def serve_one(supervisor: WorkerSupervisor) -> Worker:
    """The worker in service, having answered one request."""
    assert supervisor.wait_ready(LONG_S), supervisor.health()
    worker = supervisor.current()
    assert worker is not None
    worker.transport.send(request(1))
    assert same(worker.transport.recv(LONG_S), answer(1))
    return worker


@pytest.mark.parametrize("link_kind", ["unix", "gloo"])
def test_a_worker_starts_serves_and_leaves_when_asked(start: Start, tmp_path: Path, link_kind: str) -> None:
    told = {"lookahead": 3, "begin": str(tmp_path / "begin"), "farewell": str(tmp_path / "farewell")}
    supervisor = start("good", link_kind=link_kind, config=told)
    assert supervisor.current() is None  # nobody has waited for it, since it waits for us
    assert "starting" in (supervisor.health() or "")
    (tmp_path / "begin").touch()
    worker = serve_one(supervisor)
    assert worker.hello.lookahead == 3
    assert (supervisor.state, supervisor.health(), supervisor.restarts) == (WorkerState.READY, None, 0)
    supervisor.close()
    assert (tmp_path / "farewell").read_text() == "Shutdown"
    with pytest.raises(TransportError):
        worker.transport.recv(0)


def test_one_that_stops_one_that_is_killed_and_one_that_will_not_leave(start: Start) -> None:
    supervisor = start("good", RestartPolicy(first_pause_s=0.02, grace_s=0.3), config={"stubborn": True})
    first = serve_one(supervisor)
    first_pid = supervisor.pid or 0
    os.kill(first_pid, signal.SIGSTOP)
    first.transport.send(request(2))
    assert first.transport.recv(0.1) is None
    supervisor.report(first.generation, "no answer for 10 s")  # as the speculator does
    assert supervisor.current() is None
    assert "no answer for 10 s" in (supervisor.health() or "")

    second = serve_one(supervisor)
    assert second.generation > first.generation
    assert is_gone(first_pid)
    supervisor.report(first.generation, "late news of a worker long gone")
    assert supervisor.current() is second
    os.kill(supervisor.pid or 0, signal.SIGKILL)
    with pytest.raises(TransportError):
        second.transport.recv(LONG_S)
    assert eventually(lambda: supervisor.restarts == 2)
    assert "SIGKILL" in (supervisor.reason or "")

    serve_one(supervisor)
    last_pid = supervisor.pid or 0
    supervisor.close()
    assert is_gone(last_pid)


def test_a_worker_that_dies_at_once_is_tried_again_with_growing_pauses(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = start("tests.engine.worker_that_dies:serve")
    assert eventually(lambda: supervisor.restarts >= 2)
    assert "exited with status 7" in (supervisor.reason or "")
    assert "no speculation" in (supervisor.health() or "")
    assert supervisor.current() is None
    supervisor.close()
    lost = [r.getMessage() for r in caplog.records if "lost" in r.getMessage()]
    assert ["retry_s=0.02" in lost[0], "retry_s=0.04" in lost[1]] == [True, True]


def test_nobody_waits_for_a_worker_that_cannot_be_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One in the hands of a driver that hangs: the next is started without it."""
    monkeypatch.setattr("ssd_ascend.speculation.supervisor._DEATH_S", 0.01)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: None)
    supervisor = start("good")
    first = serve_one(supervisor)
    held = supervisor.pid or 0
    try:
        os.kill(held, signal.SIGSTOP)
        supervisor.report(first.generation, "no answer for 10 s")
        assert serve_one(supervisor).generation == first.generation + 1
        assert not is_gone(held)
        told = [record.getMessage() for record in caplog.records]
        assert [line for line in told if f"held by the system pid={held}" in line]
    finally:
        os.kill(held, signal.SIGKILL)
        monkeypatch.undo()


def test_whatever_a_line_s_library_raises_the_next_worker_is_started(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """When the line is made, when it is waited at, and when it is parted from."""
    troubles = ["made", "waited at", "parted from"]

    class Troubled:
        """A line that fails at one of these."""

        def __init__(self, line: Link, trouble: str) -> None:
            self._line, self._trouble = line, trouble
            self.address, self.pass_fds = line.address, line.pass_fds

        def accept(self, timeout_s: float) -> Transport | None:
            self._fail("waited at")
            return self._line.accept(timeout_s)

        def close(self) -> None:
            self._line.close()
            self._fail("parted from")

        def _fail(self, at: str) -> None:
            if self._trouble == at:
                raise RuntimeError(f"the library cannot be {at}")

    def new_link(generation: int) -> Link:
        trouble = troubles[generation - 1] if generation <= len(troubles) else ""
        if trouble == "made":
            raise RuntimeError("the library cannot be made\nand a page of trace")
        return Troubled(make_link("unix", generation=generation), trouble)

    supervisor = start("good", new_link=new_link)
    third = serve_one(supervisor)
    assert (third.generation, supervisor.restarts) == (3, 2)
    assert supervisor.reason == "RuntimeError: the library cannot be waited at"
    supervisor.report(3, "no answer for 10 s")
    assert serve_one(supervisor).generation == 4
    assert supervisor.restarts == 3
    told = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    assert told.count(("draft worker lost for an unforeseen reason", True)) == 2
    assert told.count(("a draft worker could not be parted from", True)) == 1


def test_pauses_double_up_to_a_limit() -> None:
    policy = RestartPolicy()
    assert [policy.pause_s(n) for n in (1, 2, 3, 7, 1000)] == [0.5, 1.0, 2.0, 30.0, 30.0]


def test_a_worker_begins_with_a_hello_of_our_version() -> None:
    ours = workers.hello(5)
    assert introduced(ours) is ours
    with pytest.raises(TransportError, match=f"speaks version 77, we speak {PROTOCOL_VERSION}"):
        introduced(dataclasses.replace(ours, version=77))
    with pytest.raises(TransportError, match="began with Shutdown"):
        introduced(Shutdown())


def test_a_worker_that_takes_too_long_to_start_is_ended(start: Start) -> None:
    supervisor = start("says_nothing", RestartPolicy(first_pause_s=LONG_S, start_timeout_s=0.2))
    assert eventually(lambda: supervisor.restarts == 1)
    assert "within 0.2 s" in (supervisor.reason or "")
    assert eventually(lambda: supervisor.pid is None)


def test_an_entry_that_names_no_function_says_so(start: Start) -> None:
    supervisor = start("tests.engine.worker_that_is_not:serve", RestartPolicy(first_pause_s=LONG_S))
    assert eventually(lambda: supervisor.restarts == 1)
    assert "exited with status 1" in (supervisor.reason or "")


def test_a_worker_that_cannot_work_says_so_in_one_sentence(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = start("cannot", RestartPolicy(first_pause_s=LONG_S))
    assert eventually(lambda: supervisor.restarts == 1)
    assert "exited with status 1" in (supervisor.reason or "")
    told = capfd.readouterr().err
    assert "the head lacks a tensor (complete it)" in told
    assert "Traceback" not in told


def test_a_hello_that_does_not_fit_is_refused(start: Start) -> None:
    def check(hello: Hello) -> None:
        raise ConfigError(f"lookahead {hello.lookahead} there, 9 here")

    supervisor = start("good", RestartPolicy(first_pause_s=LONG_S), check_hello=check)
    assert eventually(lambda: supervisor.restarts == 1)
    assert "lookahead 5 there, 9 here" in (supervisor.reason or "")


def test_close_ends_a_worker_that_is_starting(start: Start) -> None:
    supervisor = start("says_nothing")
    assert eventually(lambda: supervisor.pid is not None)
    pid = supervisor.pid or 0
    supervisor.close()
    supervisor.close()
    assert is_gone(pid)


def test_starting_and_ending_leaves_no_open_files(start: Start) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    for _ in range(3):
        supervisor = start("says_nothing")
        assert eventually(lambda: supervisor.pid is not None)  # noqa: B023 - asked at once
        supervisor.close()
    assert open_files() <= before


PARENT = """
import sys, time
from ssd_ascend.speculation.supervisor import WorkerSupervisor
supervisor = WorkerSupervisor("tests.engine.workers:prints", {"lookahead": 5})
print(supervisor.wait_ready(300.0), supervisor.pid, flush=True)
time.sleep(600.0)
"""


def test_the_worker_dies_with_its_parent_ignores_signals_to_the_group_and_leaves_standard_output_alone() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        ready, pid = parent.stdout.readline().split()  # were "careless" to come first, this would not be two words
        assert ready == "True"
        for sent in (signal.SIGINT, signal.SIGTERM):
            os.kill(int(pid), sent)
        time.sleep(0.2)
        assert not is_gone(int(pid))
        parent.kill()
        parent.wait()
        assert eventually(lambda: is_gone(int(pid)) or is_zombie(int(pid)))
    finally:
        parent.kill()
        parent.communicate()


def is_zombie(pid: int) -> bool:
    """Dead, but whoever inherited it has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
