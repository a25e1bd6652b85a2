"""A line over a connected stream socket: between two processes of one host, or (see `tcp.py`) between hosts.

Frames carry their own length. Every wait has a bound, and the death of the other side shows as end of file at once. A
sender does not wait for a busy peer; one that takes nothing for `send_timeout_s` breaks the line.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from typing import Final

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.backlog import Backlog
from ssd_ascend.transport.frame import HEADER_BYTES, MAX_MESSAGE_BYTES, total_bytes
from ssd_ascend.transport.messages import Message
from ssd_ascend.transport.wire import decode, encode

SEND_TIMEOUT_S: Final = 10.0
_SOCKET_BUFFER_BYTES: Final = 4 << 20
"""Asked for, so that a frame of some MB leaves in few pieces; the kernel grants what it allows."""

_STAGE_BYTES: Final = 16 << 10
"""Frames up to this size arrive with a single read."""


class SocketTransport:
    """One end. Takes the socket over. One thread may send while another receives; any thread may close."""

    def __init__(
        self, sock: socket.socket, *, send_timeout_s: float = SEND_TIMEOUT_S, limit: int = MAX_MESSAGE_BYTES
    ) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        self._socket = sock
        self._send_timeout_s = send_timeout_s
        self._limit = limit
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._staged = 0
        self._frame: bytearray | None = None
        self._filled = 0
        self._broken: str | None = None
        self._backlog = Backlog(self._write_all)

    @classmethod
    def pair(cls) -> tuple[SocketTransport, SocketTransport]:
        """Two connected ends in this process, for tests."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    def fileno(self) -> int:
        """For `select`: readable when there is news, once `recv(0)` has given None."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """See `Transport.send`; what the kernel does not take at once is written in the background, in order."""
        data = memoryview(encode(message, limit=self._limit))
        with self._writing:
            self._must_be_whole()
            if self._backlog.is_empty:
                data = self._write_some(data)
            if data:
                self._backlog.add(data)
                self._must_be_whole()

    def recv(self, timeout_s: float | None) -> Message | None:
        """See `Transport.recv`. A frame that is half here when the time is up is finished by a later call."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._reading:
            try:
                frame = self._read(deadline)
                return None if frame is None else decode(frame, limit=self._limit)
            except OSError as error:
                raise self._break(f"the other side is gone: {error}") from error
            except TransportError as error:
                raise self._break(error.message) from error

    def close(self) -> None:
        """See `Transport.close`."""
        self._break("the line was closed by this side")
        self._backlog.close()
        with self._reading, self._writing:  # both were woken by the shutdown; the number of a file is reused at once
            self._socket.close()

    def _write_some(self, data: memoryview) -> memoryview:
        """Write what the kernel takes now; returns the rest."""
        try:
            while data:
                data = data[self._socket.send(data) :]
        except BlockingIOError:
            return data
        except OSError as error:
            raise self._break(f"the other side is gone: {error}") from error
        return data

    def _write_all(self, data: memoryview) -> None:
        """Write a whole frame, as fast as the other side reads."""
        while data := self._write_some(data):
            if not _wait(self._writable, time.monotonic() + self._send_timeout_s):
                what = f"{len(data)} bytes were not taken within {self._send_timeout_s:g} s"
                raise self._break(f"the other side does not read: {what}")
            self._must_be_whole()

    def _read(self, deadline: float | None) -> bytearray | None:
        """The next frame; None when the time is up before it is whole."""
        while True:
            self._must_be_whole()
            frame = self._next_frame()
            if frame is not None:
                return frame
            if not _wait(self._readable, deadline):
                return None
            with contextlib.suppress(BlockingIOError):
                self._fill()

    def _fill(self) -> None:
        """Read what is there: the rest of a long frame straight into it, anything else into the stage."""
        if self._frame is not None:
            got = self._socket.recv_into(memoryview(self._frame)[self._filled :])
            self._filled += got
        else:
            got = self._socket.recv_into(self._stage[self._staged :])
            self._staged += got
        if got == 0:
            raise TransportError(self._broken or "the other side closed the line")

    def _next_frame(self) -> bytearray | None:
        """Take a whole frame; move the beginning of one that is longer than the stage to its own place."""
        if self._frame is None and self._staged >= HEADER_BYTES:
            total = total_bytes(self._stage[: self._staged], limit=self._limit)
            if total <= self._staged or total > len(self._stage):
                self._frame = bytearray(total)
                self._filled = min(total, self._staged)
                memoryview(self._frame)[: self._filled] = self._stage[: self._filled]
                self._staged -= self._filled
                self._stage[: self._staged] = self._stage[self._filled : self._filled + self._staged]
        if self._frame is None or self._filled < len(self._frame):
            return None
        frame, self._frame = self._frame, None
        return frame

    def _must_be_whole(self) -> None:
        if self._broken is not None:
            raise TransportError(self._broken)

    def _break(self, reason: str) -> TransportError:
        """Give the line up for good, waking whoever waits on it here or there; the first reason stays."""
        if self._broken is None:
            self._broken = reason
        with contextlib.suppress(OSError):  # already shut
            self._socket.shutdown(socket.SHUT_RDWR)
        return TransportError(reason)


def _wait(poll: select.poll, deadline: float | None) -> bool:
    """True when the socket may have news, False when the deadline passed; asks at least once."""
    if deadline is None:
        return bool(poll.poll())
    return bool(poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000.0))))
