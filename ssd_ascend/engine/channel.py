"""The engine process's end of its line to the front end: a socket that neither blocks a step nor loses a byte.

A socket pair rather than a named socket: nobody else can connect, nothing is left behind in the file system, and the
death of either side is seen by the other at once, as end of file. The front end's own half is asyncio's streams.
"""

from __future__ import annotations

import selectors
import socket
from types import TracebackType

from ssd_ascend.engine.messages import HEADER, Command, Report, frame, parse_command

_CHUNK = 1 << 18


class ChannelClosedError(Exception):
    """The front end is gone."""


class EngineChannel:
    """Commands in, reports out. `send` never waits: what the socket does not take now is kept for the next call."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def __enter__(self) -> EngineChannel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._selector.close()
        self._socket.close()

    def send(self, report: Report) -> None:
        """Queue one report and hand the socket what it takes."""
        self._outgoing += frame(report)
        self._flush()

    def commands(self, *, most_s: float | None) -> list[Command]:
        """The commands that have come; sleeps until there is one, or `most_s` are over: 0 only looks, None waits.
        Raises ChannelClosedError at the end."""
        while True:
            for _, events in self._selector.select(timeout=most_s):
                if events & selectors.EVENT_WRITE:
                    self._flush()
                if events & selectors.EVENT_READ:
                    self._fill()
            found = self._complete()
            if found or most_s is not None:
                return found

    def drain(self, timeout_s: float) -> None:
        """Give the last reports a chance to leave before the process ends."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(self._outgoing)
        except OSError:
            return  # the reader is gone or stuck; there is nobody to tell
        self._outgoing.clear()

    def _flush(self) -> None:
        try:
            sent = self._socket.send(self._outgoing) if self._outgoing else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ChannelClosedError from error
        del self._outgoing[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted)

    def _fill(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError from error
        if not data:
            raise ChannelClosedError
        self._incoming += data

    def _complete(self) -> list[Command]:
        """Take every whole message out of what has come in."""
        found: list[Command] = []
        at = 0
        while len(self._incoming) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._incoming, at)
            if len(self._incoming) - at < HEADER.size + size:
                break
            at += HEADER.size + size
            found.append(parse_command(bytes(self._incoming[at - size : at])))
        del self._incoming[:at]
        return found
