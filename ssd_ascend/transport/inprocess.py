"""Both ends of a line in one thread: for tests, and for a target and a drafter that share one device.

Nothing runs in the background: a `recv` on the target's end calls the worker's `pump` until an answer lies there, so a
run is the same every time. Messages go through the wire unless told otherwise, so what works here works elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.messages import Message
from ssd_ascend.transport.wire import decode, encode


class InProcessTransport:
    """One end; made in pairs. The worker's end has no pump: its `recv` never waits."""

    def __init__(self, inbox: deque[Message | bytearray], *, through_wire: bool) -> None:
        self._inbox = inbox
        self._through_wire = through_wire
        self._peer: InProcessTransport = self
        self._pump: Callable[[], None] | None = None
        self._closed = False

    @classmethod
    def pair(cls, *, through_wire: bool = True) -> tuple[InProcessTransport, InProcessTransport]:
        """(target's end, worker's end). through_wire=False hands objects over as they are, tensors shared."""
        target, worker = (cls(deque(), through_wire=through_wire) for _ in range(2))
        target._peer, worker._peer = worker, target
        return target, worker

    def attach_pump(self, pump: Callable[[], None]) -> None:
        """Called on the worker's end: `pump` handles what lies in its inbox and returns when nothing does."""
        self._peer._pump = pump

    @property
    def pending(self) -> int:
        """Messages that wait here; lets a worker ask without taking one."""
        return len(self._inbox)

    def send(self, message: Message) -> None:
        """See `Transport.send`."""
        self._must_be_open()
        self._peer._inbox.append(encode(message) if self._through_wire else message)

    def recv(self, timeout_s: float | None) -> Message | None:
        """See `Transport.recv`. Without a time limit, a worker that has nothing to say is a TransportError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            self._must_be_open()
            if self._pump is None or not self._pump_once():
                if deadline is None:
                    raise TransportError("nothing will ever come: the other side lies idle in this very thread")
                return None
            if deadline is not None and not self._inbox and time.monotonic() >= deadline:
                return None
        if self._closed:
            raise TransportError("the line was closed by this side")
        item = self._inbox.popleft()
        return decode(item) if isinstance(item, bytearray) else item

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True

    def _pump_once(self) -> bool:
        """Let the worker work; False when that changed nothing."""
        assert self._pump is not None
        before = len(self._peer._inbox)
        self._pump()
        return bool(self._inbox) or len(self._peer._inbox) != before or self._peer._closed

    def _must_be_open(self) -> None:
        if self._closed or self._peer._closed:
            whose = "this" if self._closed else "the other"
            raise TransportError(f"the line was closed by {whose} side")
