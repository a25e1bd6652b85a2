"""uvicorn as this project runs it: clients that keep us waiting are let go, what is no HTTP is told so in our shape.

`serve/server.py` makes one for every address it listens on. Bodies have a clock of their own (`ServerState.read_body`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssd_ascend.serve.errors import error_body
from ssd_ascend.serve.http_wire import MAX_HEAD_BYTES

_KEEP_ALIVE_S = 75
"""Longer than clients keep an unused connection, so that none sends a request into a closing one."""
_LINGER_S = 1.0
"""How long we go on reading from who was refused: closing at once would reset the line before our answer is read."""
_BACKSTOP_S = 5.0

Refused = Callable[[int, str, str], None]
"""Told of what was refused before it was a request: status, client, reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds a client may take: for the head of a request, to read some of its answer, to leave when we stop (after
    which `hang_up` is the caller's to call)."""

    head_s: float
    unread_s: float
    stop_s: float


class HttpServer(uvicorn.Server):
    """One app on one listening socket. It leaves signals to us: uvicorn would end the process by the signal."""

    def __init__(self, app: ASGIApp, *, patience: Patience, refused: Refused) -> None:
        connection = partial(_Connection, patience=patience, refused=refused)
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], connection),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(patience.stop_s + _BACKSTOP_S),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        super().__init__(config)

    def hang_up(self) -> None:
        """End every connection now; whoever still writes an answer sees that its client has left."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Connection):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """uvicorn's connection, with a clock on the head of a request and one on an answer that is not read."""

    def __init__(self, *args: Any, patience: Patience, refused: Refused, **more: Any) -> None:
        super().__init__(*args, **more)
        self._patience = patience
        self._refused = refused
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._time_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._time_the_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.conn.trailing_data[0]:
            self._time_the_head()  # the next one has begun

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._patience.unread_s, self._give_up_on_reader)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where h11 raised: what came is no request."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError):
            self._refuse(error.error_status_hint, f"this is no HTTP/1.1 request: {error}")
        else:
            self._refuse(400, msg)

    def _time_the_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._patience.head_s, self._give_up_on_head)

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        is_under_way = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or is_under_way:
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of the request took longer than {self._patience.head_s:g} s")
        else:
            self.transport.close()

    def _give_up_on_reader(self) -> None:
        self._unread_timer = None
        self._note(0, f"the client read nothing of its answer for {self._patience.unread_s:g} s")
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        self._note(status, message)
        body = error_body(status, message)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        try:
            head = self.conn.send(h11.Response(status_code=status, headers=headers, reason=b""))
            rest = (self.conn.send(h11.Data(data=body)), self.conn.send(h11.EndOfMessage()))
        except h11.LocalProtocolError:  # an answer is under way, and nothing can be said beside it
            self.transport.abort()
            return
        self._is_refused = True
        self.transport.write(b"".join(part or b"" for part in (head, *rest)))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _note(self, status: int, reason: str) -> None:
        self._refused(status, self.client[0] if self.client else "", reason)
