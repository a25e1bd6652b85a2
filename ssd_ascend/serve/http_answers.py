"""Whole answers of our own as bytes, and errors in OpenAI's shape. For who writes to a line without the framework."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an error, {"error": {"message", "type", "param", "code"}}."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def answer(status: int, body: bytes, content_type: str) -> bytes:
    """A whole answer, the last on its connection."""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def head_of(whole: bytes) -> bytes:
    """The head of such an answer, for who asked by HEAD."""
    return whole[: whole.index(b"\r\n\r\n") + 4]


def error(status: int, message: str) -> bytes:
    """An error as such an answer."""
    return answer(status, error_body(status, message), "application/json")
