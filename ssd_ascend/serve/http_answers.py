"""Whole answers of our own as bytes, and errors in OpenAI's shape. For who writes to a line without the framework."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

_BY_CLIENT = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: _BY_CLIENT,  # HTTP's own words for what a client should not have sent: a coding that we do not know,
    505: _BY_CLIENT,  # or another version; nothing is wrong with the server, and asking again is of no use
}
_CODES = {408: "request_timeout", 413: "body_too_large", 415: "unsupported_encoding", 503: "engine_unavailable"}
"""What such an error is called, whoever tells it."""
_HEADERS = {503: {"Retry-After": "1"}}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an error, {"error": {"message", "type", "param", "code"}}."""
    kind = _TYPES.get(status, _BY_CLIENT if status < 500 else "server_error")
    told = {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}
    return msgspec.json.encode({"error": told})


def error_headers(status: int) -> dict[str, str]:
    """What every error of this status says beside its body."""
    return dict(_HEADERS.get(status, {}))


def answer(status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole answer, the last on its connection."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n{more}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def head_of(whole: bytes) -> bytes:
    """The head of such an answer, for who asked by HEAD."""
    return whole[: whole.index(b"\r\n\r\n") + 4]


def error(status: int, message: str) -> bytes:
    """An error as such an answer."""
    return answer(status, error_body(status, message), "application/json", error_headers(status))
