"""The page at `/`: three static files from `web/`, which talk to the API like any other client, for `serve/app.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/web/style.css": ("style.css", "text/css; charset=utf-8"),
    "/web/app.js": ("app.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    # nothing from elsewhere is loaded, nothing is sent elsewhere, and nobody frames it
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> APIRouter:
    """The routes of the page. It needs no key itself; what it asks the API for does."""
    router = APIRouter()
    for path, (name, media_type) in _FILES.items():
        content = (resources.files("ssd_ascend.serve") / "web" / name).read_bytes()
        router.add_api_route(path, _file(content, media_type), methods=["GET"], include_in_schema=False)
    return router


def _file(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
