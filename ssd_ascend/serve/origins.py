"""Keeps pages of other sites from calling: whoever runs a server on a machine with a browser also visits such pages.

A browser lets any page send a POST of plain text anywhere, and asks for no permission first; it only keeps the answer
from it. But it says where the page is from, in headers that no page can set. Plain ASGI; around the apps of
`serve/app.py` and `serve/admin.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_ascend.serve.errors import error_response

_READING = ("GET", "HEAD", "OPTIONS")


class OwnPagesOnly:
    """Answers 403 to what a page of another site sends, unless `named` has its origin ("*": anybody's)."""

    def __init__(self, app: ASGIApp, *, named: Collection[str] = ()) -> None:
        self._app = app
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READING:
            headers = Headers(scope=scope)
            if not self._may_call(headers):
                await _refusal(headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may_call(self, headers: Headers) -> bool:
        origin, relation = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._named or origin in self._named:
            return True
        if relation is not None:  # the browser's own word, which holds behind any proxy; over plain HTTP it has none
            return relation in ("same-origin", "none")
        return origin is None or _is_own(origin, headers)


def _is_own(origin: str, headers: Headers) -> bool:
    """Whether an origin is the address that this server is asked at. A proxy may put its own into Host and keep the
    client's in X-Forwarded-Host, which pages cannot send without permission either."""
    try:
        host = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    forwarded = headers.get("x-forwarded-host", "").split(",")[0].strip()
    return host != "" and host in (headers.get("host", "").lower(), forwarded.lower())


def _refusal(headers: Headers) -> ASGIApp:
    origin = headers.get("origin", "of another site")
    return error_response(
        403,
        f"this is asked by a page from {origin[:200]!r}, which is neither this server's own nor named "
        "(start the server with --cors-origin and that origin)",
        code="origin_not_allowed",
    )
