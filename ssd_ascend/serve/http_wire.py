"""Just enough HTTP/1.1 for a reverse proxy: one request in, its head rewritten, the answer passed on byte for byte.

Every answer ends with the connection, so that `router.py` need not find out where it ends. `ray_front.py`, which hands
answers to somebody who writes heads of his own, takes them apart with `read_answer`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 32 << 20
_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect"})
"""Headers that are between two neighbours only."""
REASONS = {400: "Bad Request", 411: "Length Required", 413: "Content Too Large", 502: "Bad Gateway"}
REASONS |= {200: "OK", 503: "Service Unavailable", 431: "Request Header Fields Too Large"}


class BadRequestError(Exception):
    """What came is no request we can pass on; `status` says how so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request, whole."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def onward(self, client: str) -> bytes:
        """The request as we send it to a replica."""
        kept = [(name, value) for name, value in self.headers if name.lower() not in _HOP]
        lines = [f"{self.method} {self.path} HTTP/1.1".encode("latin-1")]
        lines += [name + b": " + value for name, value in kept]
        lines += [b"Connection: close", b"X-Forwarded-For: " + client.encode("latin-1", "replace")]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None when the client left without one. Raises BadRequestError."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise BadRequestError(431, f"the head of the request is over {MAX_HEAD_BYTES} bytes") from None
    first, *lines = head[:-4].split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        raise BadRequestError(400, "this is no HTTP/1.1 request")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise BadRequestError(400, "a header of the request is malformed")
        headers.append((name, value.strip()))
    body = await _read_body(reader, headers)
    return Request(parts[0].decode("latin-1"), parts[1].decode("latin-1"), tuple(headers), body)


async def _read_body(reader: asyncio.StreamReader, headers: list[tuple[bytes, bytes]]) -> bytes:
    values = {name.lower(): value for name, value in headers}
    if b"transfer-encoding" in values:
        raise BadRequestError(411, "send the body with a Content-Length")
    lengths = {value for name, value in headers if name.lower() == b"content-length"}
    if not lengths:
        return b""
    (length, *others) = lengths
    if others or not length.isdigit():
        raise BadRequestError(400, "Content-Length is no number, or two")
    if int(length) > MAX_BODY_BYTES:
        raise BadRequestError(413, f"the body is over the limit of {MAX_BODY_BYTES} bytes")
    try:
        return await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        raise BadRequestError(400, "the client left before it had sent its request") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """A replica's answer, its body still to come. The headers are those for the client."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: AsyncIterator[bytes]


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The head of an answer, and its body as it comes, freed of chunks. asyncio.IncompleteReadError when it breaks."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    chunked = (b"transfer-encoding", b"chunked") in headers
    kept = tuple(each for each in headers if each[0] not in _HOP and each[0] != b"transfer-encoding")
    return Answer(int(first.split(b" ")[1]), kept, _chunks(reader) if chunked else _rest(reader))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(MAX_HEAD_BYTES):
        yield data


def answer(status: int, body: bytes, content_type: str) -> bytes:
    """A whole answer of our own."""
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def error(status: int, message: str) -> bytes:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return answer(status, json.dumps(body).encode(), "application/json")
