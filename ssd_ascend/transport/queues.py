"""Both ends of a line between two threads of one process: messages are handed over as they are, tensors shared.

A tensor must hold still once it is sent, and its device's work on it must be over. Used by `worker_thread.py`.
"""

from __future__ import annotations

import queue

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.messages import Message


class QueueTransport:
    """One end; made in pairs."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._peer: QueueTransport = self
        self._open = True

    @classmethod
    def pair(cls) -> tuple[QueueTransport, QueueTransport]:
        """Two ends of one line."""
        one, other = cls(), cls()
        one._peer, other._peer = other, one
        return one, other

    def send(self, message: Message) -> None:
        """See `Transport.send`."""
        if not (self._open and self._peer._open):
            raise TransportError(f"the line was closed by {'the other' if self._open else 'this'} side")
        self._peer._inbox.put(message)

    def recv(self, timeout_s: float | None) -> Message | None:
        """See `Transport.recv`."""
        if not self._open:
            raise TransportError("the line was closed by this side")
        try:
            message = self._inbox.get_nowait() if timeout_s == 0.0 else self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            if self._peer._open:
                return None
            message = None
        if message is None:
            self._inbox.put(None)  # whoever asks again hears the same
            raise TransportError("the line was closed by the other side")
        return message

    def close(self) -> None:
        """See `Transport.close`."""
        self._open = False
        self._peer._inbox.put(None)
        self._inbox.put(None)
