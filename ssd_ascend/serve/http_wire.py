"""Just enough HTTP/1.1 for a reverse proxy: one request in, its head written anew, the answer passed on byte for byte.

Requests are read by the server's own parser (`http_parser.py`), so that a replica never understands another request
than the router did. Every answer ends with the connection, so that `router.py` need not
find out where it ends. `ray_front.py`, which hands answers to somebody who writes heads of his own, takes them apart
with `read_answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httptools

from ssd_ascend.serve.http_parser import MAX_HEAD_BYTES, BadRequestError, StrictParser

_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect"})
"""Headers that are between two neighbours only."""
_NOT_PASSED_ON = _HOP | {b"content-length", b"transfer-encoding"}
"""And headers that say where a body ends; we say so ourselves."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, whole. Names of headers in lower case."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    version: str = "1.1"
    """Of the client's HTTP: a replica answers one of 1.0 as such a client can read it."""

    @property
    def resource(self) -> str:
        """The path without its query; of a whole address, as a client asks that takes us for a proxy, its path."""
        if self.path.startswith("/"):
            return self.path.partition("?")[0]
        return str(httptools.parse_url(self.path.encode("latin-1")).path, "latin-1")  # the parser has found one there

    def onward(self, client: str) -> bytes:
        """The request as we send it to a replica."""
        kept = [(name, value) for name, value in self.headers if name not in _NOT_PASSED_ON]
        lines = [f"{self.method} {self.path} HTTP/{self.version}".encode("latin-1")]
        lines += [name + b": " + value for name, value in kept]
        lines += [b"Connection: close", b"X-Forwarded-For: " + client.encode("latin-1", "replace")]
        lines += [b"Content-Length: %d" % len(self.body)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


class _Incoming:
    """A request on its way in, as the parser tells of it. What comes behind it is nobody's. `say` tells its client."""

    def __init__(self, say: Callable[[bytes], object], max_body_bytes: int) -> None:
        self._say = say
        self._max_body_bytes = max_body_bytes
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self.parser = StrictParser(self)
        self.request: Request | None = None

    def on_message_begin(self) -> None:
        if self.request is not None:
            raise BadRequestError(400, "one request a connection")

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers = dict(self._headers)
        self._check_size(int(headers.get(b"content-length", 0)))
        asks = headers.get(b"expect", b"").lower() == b"100-continue"
        if asks and self.parser.get_http_version() != "1.0":  # where that would be taken for the answer
            self._say(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body
        self._check_size(len(self._body))

    def on_message_complete(self) -> None:
        method, path = self.parser.get_method().decode("latin-1"), self._url.decode("latin-1")
        version = self.parser.get_http_version()
        self.request = Request(method, path, tuple(self._headers), bytes(self._body), version)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise BadRequestError(413, f"the body is over the limit of {self._max_body_bytes} bytes")


async def read_request(
    reader: asyncio.StreamReader, say: Callable[[bytes], object], max_body_bytes: int
) -> Request | None:
    """The first request of a connection; None when the client left without one. Raises BadRequestError.

    say: how a client is told that it may send its body, if it asks.
    """
    incoming = _Incoming(say, max_body_bytes)
    try:
        return await _read_into(incoming, reader)
    finally:
        incoming.parser.close()


async def _read_into(incoming: _Incoming, reader: asyncio.StreamReader) -> Request | None:
    has_begun = False
    while incoming.request is None:
        data = await reader.read(MAX_HEAD_BYTES)
        if not data and has_begun:
            raise BadRequestError(400, "the client left before it had sent its request")
        if not data:
            return None
        has_begun = True
        try:
            incoming.parser.feed_data(data)
        except BadRequestError:
            if incoming.request is None:  # else it was about what comes behind it
                raise
    return incoming.request


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
