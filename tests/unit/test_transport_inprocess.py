"""The line inside one thread: the target's `recv` makes the worker work, and every wait ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.inprocess import InProcessTransport
from ssd_ascend.transport.messages import Request, Shutdown
from tests.unit.plain_messages import answer, request, same


def echoing(worker: InProcessTransport) -> Callable[[], None]:
    """A pump that answers every request that waits."""

    def pump() -> None:
        while (message := worker.recv(0)) is not None:
            assert isinstance(message, Request)
            worker.send(answer(message.number))

    return pump


@pytest.mark.parametrize("through_wire", [True, False])
def test_recv_pumps_until_the_answer_is_there(through_wire: bool) -> None:
    target, worker = InProcessTransport.pair(through_wire=through_wire)
    worker.attach_pump(echoing(worker))
    for number in range(3):
        target.send(request(number))
        assert worker.pending == 1  # nothing happens behind the caller's back
        assert same(target.recv(None), answer(number))
    assert target.recv(0) is None


def test_a_pump_may_need_several_turns() -> None:
    target, worker = InProcessTransport.pair()
    turns: list[int] = []

    def pump() -> None:
        turns.append(1)
        if len(turns) == 1:
            worker.recv(0)
        else:
            worker.send(answer())

    worker.attach_pump(pump)
    target.send(request())
    assert same(target.recv(5.0), answer())
    assert len(turns) == 2


def test_objects_are_shared_only_when_asked() -> None:
    for through_wire in (True, False):
        target, worker = InProcessTransport.pair(through_wire=through_wire)
        sent = answer()
        worker.send(sent)
        assert (target.recv(0) is sent) is not through_wire


def test_a_silent_worker_ends_the_wait() -> None:
    target, worker = InProcessTransport.pair()
    worker.attach_pump(lambda: None)
    target.send(request())
    before = time.monotonic()
    assert target.recv(60.0) is None
    assert time.monotonic() - before < 30.0
    with pytest.raises(TransportError, match="nothing will ever come"):
        target.recv(None)
    with pytest.raises(TransportError, match="nothing will ever come"):
        InProcessTransport.pair()[1].recv(None)


def test_closing_ends_both_sides_after_what_was_sent_is_read() -> None:
    target, worker = InProcessTransport.pair()
    target.send(Shutdown())
    target.close()
    target.close()
    assert worker.recv(None) == Shutdown()
    for use in (lambda: worker.recv(0), lambda: worker.send(answer())):
        with pytest.raises(TransportError, match="the other side"):
            use()
    for use in (lambda: target.recv(0), lambda: target.send(request())):
        with pytest.raises(TransportError, match="this side"):
            use()


def test_a_worker_that_closes_while_pumped_is_noticed() -> None:
    target, worker = InProcessTransport.pair()
    worker.attach_pump(worker.close)
    target.send(request())
    with pytest.raises(TransportError, match="the other side"):
        target.recv(None)


def test_what_cannot_travel_is_refused_in_process_too() -> None:
    target, _ = InProcessTransport.pair()
    with pytest.raises(TransportError, match="no int64"):
        target.send(Request(number=1 << 63))
