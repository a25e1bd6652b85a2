"""Gives every request an id, which comes back in `x-request-id` and stands in every log line, and logs one line for it.

Plain ASGI, since the framework's own middleware class slows streams. Wrapped around the whole app in `serve/app.py`.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_ascend.log import fields, get_logger, request_id
from ssd_ascend.serve.metrics import ServerMetrics

log = get_logger(__name__)
OUTCOME = "ssd.outcome"
"""The key of a request's scope under which the answer's token counts are left, for the log and for traces."""
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # what a client may call its request: it lands in our logs


class AccessLog:
    """Counts and logs responses by path and status. `known`: paths that may become metric labels; others are "other",
    as an attacker must not make labels."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics, known: frozenset[str], is_loud: bool = False) -> None:
        self._app = app
        self._level = logging.INFO if is_loud else logging.DEBUG
        self._metrics = metrics
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        own_id = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        token = request_id.set(own_id.decode())
        scope[OUTCOME] = {}
        started_s, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", own_id)]}
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"] if scope["path"] in self._known else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            self._log(scope, status, time.monotonic() - started_s)
            request_id.reset(token)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = (scope.get("client") or ("",))[0]
        log.log(
            logging.DEBUG if scope["path"] in ("/health", "/metrics") else self._level,
            "answered %s",
            fields(
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=seconds,
                client=client,
                **scope[OUTCOME],
            ),
        )
