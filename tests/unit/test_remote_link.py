"""The thread that keeps a line to a remote speculator, where two threads meet at the worst moment."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from ssd_ascend.speculation import remote_link
from ssd_ascend.speculation.remote_link import Pauses, RemoteLink
from ssd_ascend.speculation.workers import Worker
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello
from ssd_ascend.transport.socket import SocketTransport

LONG_S = 30.0
"""For what takes milliseconds on a machine that is not busy."""
HELLO = Hello(
    version=PROTOCOL_VERSION, target_vocab=8, draft_vocab=8, feature_width=0, lookahead=2, drafter="ngram"
)  # fmt: skip


class Answered(RemoteLink):
    """A link whose calls are always answered."""

    def _call(self) -> Worker:
        self._generation += 1
        return Worker(SocketTransport.pair()[0], HELLO, self._generation)


@pytest.mark.parametrize("losses", [0, 1])
def test_a_close_is_seen_whenever_it_comes(monkeypatch: pytest.MonkeyPatch, losses: int) -> None:
    """Also just before the thread forgets what woke it, at its start or when a line was lost."""
    links: list[RemoteLink] = []
    may_clear = threading.Event()

    class ClosedBefore(threading.Event):
        """Clears when `close` has done its part, after so many times that it was not called."""

        left = losses

        def clear(self) -> None:
            if self.left == 0:
                assert may_clear.wait(LONG_S)
                links[0]._closing = True
                self.set()
            self.left -= 1
            super().clear()

    monkeypatch.setattr(
        remote_link,
        "threading",
        SimpleNamespace(Event=ClosedBefore, Condition=threading.Condition, Thread=threading.Thread),
    )
    link = Answered("127.0.0.1:1", "a secret of the tests", HELLO)
    links.append(link)
    for _ in range(losses):
        assert link.wait_ready(LONG_S)
        link.report(1, "no answer for 10 s")
    may_clear.set()
    link._thread.join(LONG_S)
    assert not link._thread.is_alive()
    assert link.current() is None
    link.close()


def test_an_error_that_nobody_foresaw_is_a_reason_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    """The thread lives, and calls again."""
    calls = 0

    class Unlucky(Answered):
        def _call(self) -> Worker:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise MemoryError("a message of a gigabyte,\nsay")
            return super()._call()

    link = Unlucky("127.0.0.1:1", "a secret of the tests", HELLO, pauses=Pauses(first_s=0.0))
    try:
        assert link.wait_ready(LONG_S)
        assert [line for line in caplog.messages if "gigabyte" in line] == [
            "speculator 127.0.0.1:1: MemoryError: a message of a gigabyte,"
        ]
    finally:
        link.close()
