"""uvicorn as this project runs it: clients that keep us waiting are let go, what is no HTTP is told so in our shape.

`serve/server.py` makes one for every address it listens on. `http_parser.py` reads the requests; bodies have a clock of
their own (`ServerState.read`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ssd_ascend.serve.http_answers import error
from ssd_ascend.serve.http_parser import BadRequestError, StrictParser

_KEEP_ALIVE_S = 75
"""Longer than clients keep an unused connection, so that none sends a request into a closing one."""
_LINGER_S = 1.0
"""How long we go on reading from who was refused: closing at once would reset the line before our answer is read."""
_BACKSTOP_S = 5.0
_MOST_DUE = 32
"""Requests that a client may send on one connection before the first is answered."""

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


class _OldClient:
    """An app for a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle = cycle
        self._app = app
        cycle.waiting_for_100_continue = False  # which such a client would take for its answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = False

        async def unchunked(message: Any) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open:
                    self._cycle.chunked_encoding = False  # left undecided, it would become chunks
            elif is_open:
                self._cycle.expected_content_length += len(message.get("body", b""))  # as if this much had been said
            await send(message)

        await self._app(scope, receive, unchunked)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection with our parser, a clock on the head of a request, and one on an answer that is not read."""

    def __init__(self, *args: Any, patience: Patience, refused: Refused, **more: Any) -> None:
        super().__init__(*args, **more)
        self._requests = StrictParser(self)
        self.parser = cast(httptools.HttpRequestParser, self._requests)  # all that uvicorn asks it for is there
        self._patience = patience
        self._refused = refused
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; uvicorn's own `cycle` is the one that was read last."""
        self._answers_due = 0
        self._refusal: BadRequestError | None = None

    # -- the line ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._time_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._requests.close()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        try:
            self._requests.feed_data(data)
        except BadRequestError as refusal:
            self._refuse(refusal)
            return
        if not self._answers_due:
            self._time_the_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._patience.unread_s, self._give_up_on_reader)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    # -- requests and answers ----------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._answers_due == _MOST_DUE:
            raise BadRequestError(400, f"{_MOST_DUE} requests on this connection wait for their turn already")
        super().on_headers_complete()
        self._answers_due += 1
        self.flow.resume_reading()  # which uvicorn stops behind a running request, whose client may leave

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _OldClient(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answers_due -= 1
        if self._answers_due:
            return
        if self._refusal is not None:
            self._tell(self._refusal)
        elif self._requests.is_in_head:
            self._time_the_head()  # the next one has begun

    # -- giving up ---------------------------------------------------------------------------------------------------

    def _time_the_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._patience.head_s, self._give_up_on_head)

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self._answers_due or self._refusal is not None:
            return
        if self._requests.is_in_head:
            self._refuse(BadRequestError(408, f"the head of the request took longer than {self._patience.head_s:g} s"))
        else:
            self.transport.close()

    def _give_up_on_reader(self) -> None:
        self._unread_timer = None
        self._note(0, f"the client read nothing of its answer for {self._patience.unread_s:g} s")
        self.transport.abort()

    def _refuse(self, refusal: BadRequestError) -> None:
        """Read no more. The client is told once the answers are out that are due to it."""
        self._refusal = refusal
        self._note(refusal.status, str(refusal))
        if self._answers_due and self.cycle.more_body and not self.cycle.response_started:
            self.cycle.disconnected = True  # its body broke; for who waits for the rest of it, the client has left
            self.cycle.message_event.set()
            self.pipeline = type(self.pipeline)(each for each in self.pipeline if each[0] is not self.cycle)
            self._answers_due -= 1
        if not self._answers_due:
            self._tell(refusal)

    def _tell(self, refusal: BadRequestError) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.transport.write(error(refusal.status, str(refusal)))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _note(self, status: int, reason: str) -> None:
        self._refused(status, self.client[0] if self.client else "", reason)
