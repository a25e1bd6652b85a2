"""HEAD, which asks for what GET would say without its body. `app.py` wraps the routes; the server drops the bodies."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Routes are found for GET; everybody outside, logs and the server among them, goes on seeing HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
