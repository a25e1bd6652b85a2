"""A speculator's door stays open: what goes wrong with one caller, or for a while, turns nobody else away."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ssd_ascend.errors import TransportError
from ssd_ascend.speculation import service as service_module
from ssd_ascend.speculation.remote_link import introduce
from ssd_ascend.speculation.service import SpeculatorService
from ssd_ascend.transport import tcp
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello
from ssd_ascend.transport.socket import SocketTransport

SECRET = "a secret of the tests"
LONG_S = 60.0
"""For what takes milliseconds on a machine that is not busy."""
HELLO = Hello(
    version=PROTOCOL_VERSION, target_vocab=8, draft_vocab=8, feature_width=0, lookahead=2, drafter="ngram",
    target="t", max_model_len=64,
)  # fmt: skip


class Failing:
    """A listening socket whose next `accept`s fail, each with one of these errors."""

    def __init__(self, inner: socket.socket, errors: list[int]) -> None:
        self._inner = inner
        self.errors = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def accept(self) -> Any:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return self._inner.accept()


class Scripted:
    """A worker whose messages turn out so, one after the other; then none come."""

    def __init__(self, *news: Exception | int) -> None:
        self._news = list(news)
        self.closed = False

    def pump(self) -> int:
        found = self._news.pop(0) if self._news else 0
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


class Idle:
    """A worker that nobody asks for anything."""

    def pump(self) -> int:
        return 0

    def rested(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[tcp.Listener]:
    found = tcp.Listener("127.0.0.1", 0, SECRET)
    yield found
    found.close()


@pytest.fixture
def service(listener: tcp.Listener) -> Iterator[SpeculatorService]:
    """A service that serves, until the end of the test."""
    found = SpeculatorService(listener, lambda line, others_wait: Idle(), HELLO)  # type: ignore[arg-type, return-value]
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    found.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()


def visit(listener: tcp.Listener) -> str:
    """Call as a target does; what drafts there."""
    line = tcp.connect("127.0.0.1", listener.port, SECRET, timeout_s=LONG_S)
    try:
        return introduce(line, HELLO, timeout_s=LONG_S).drafter
    finally:
        line.close()


def fail(listener: tcp.Listener, *errors: int) -> Failing:
    listener._socket = failing = Failing(listener._socket, list(errors))  # type: ignore[assignment]
    return failing


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_the_door_stays_open(listener: tcp.Listener, service: SpeculatorService, number: int) -> None:
    assert visit(listener) == "ngram"
    failing = fail(listener, number, number)
    assert visit(listener) == "ngram"  # the door may still have waited at the unspoilt socket
    assert visit(listener) == "ngram"
    assert failing.errors == []


def test_trouble_that_lasts_is_logged_once(
    listener: tcp.Listener, service: SpeculatorService, caplog: pytest.LogCaptureFixture
) -> None:
    fail(listener, *[errno.EMFILE] * 3)
    for _ in range(2):
        assert visit(listener) == "ngram"
    told = [record.getMessage() for record in caplog.records if "no target can be let in" in record.getMessage()]
    assert len(told) == 1
    assert "Too many open files" in told[0]


@pytest.mark.parametrize("where", [(tcp.Listener, "accept"), (service_module, "mismatch")])
def test_what_nobody_foresaw_is_one_line_and_turns_away_one_caller_at_most(
    listener: tcp.Listener,
    service: SpeculatorService,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[Any, str],
) -> None:
    own, failed = getattr(*where), threading.Event()

    def fail_once(*args: Any) -> Any:
        if failed.is_set():
            return own(*args)
        failed.set()
        raise MemoryError("a message of a gigabyte,\nsay")

    monkeypatch.setattr(*where, fail_once)
    with contextlib.suppress(TransportError):
        visit(listener)
    assert failed.wait(LONG_S)
    assert visit(listener) == "ngram"
    told = [record.getMessage() for record in caplog.records if "MemoryError: a message of" in record.getMessage()]
    assert len(told) == 1
    assert "\n" not in told[0]


def test_an_error_in_drafting_parts_from_its_target_only(listener: tcp.Listener) -> None:
    """Unless it comes for one target after the other: then it is the device's."""
    workers: list[Scripted] = []
    found = SpeculatorService(listener, lambda line, others_wait: workers[-1], HELLO)  # type: ignore[arg-type, return-value]

    def arrive(*news: Exception | int) -> Scripted:
        workers.append(Scripted(*news))
        found._arrivals.put(SocketTransport.pair()[0])
        found._admit()
        return workers[-1]

    trouble = RuntimeError("out of memory")
    broken, working = arrive(trouble), arrive(1, 1)
    found._round()
    assert (broken.closed, working.closed, found.num_guests) == (True, False, 1)
    arrive(trouble)
    arrive(trouble)
    found._round()
    assert (working.closed, found.num_guests) == (False, 1)
    arrive(trouble)
    with pytest.raises(RuntimeError, match="out of memory"):
        found._round()


def test_callers_who_are_gone_before_they_are_taken_are_skipped(listener: tcp.Listener) -> None:
    fail(listener, errno.ECONNABORTED, errno.EHOSTUNREACH)
    assert listener.accept(0.2) is None


@pytest.mark.parametrize("where", ["_tuned", "SocketTransport"])
def test_a_caller_who_hangs_up_after_the_handshake_is_skipped(
    listener: tcp.Listener, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The system may refuse to set options of a line that is broken."""
    taken: list[socket.socket] = []

    def refuse(sock: socket.socket, **_: object) -> None:
        taken.append(sock)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def call() -> None:
        with socket.create_connection(("127.0.0.1", listener.port)) as sock:
            tcp._show_then_ask(sock, SECRET.encode())

    monkeypatch.setattr(tcp, where, refuse)
    caller = threading.Thread(target=call)
    caller.start()
    assert listener.accept(1.0) is None
    caller.join()
    assert [sock.fileno() for sock in taken] == [-1]  # closed
