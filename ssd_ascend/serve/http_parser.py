"""Reads HTTP/1.1 requests in one way only: what another reader, a proxy in front of us, might understand differently is
refused, and so is what is endless.

httptools (llhttp, the parser of Node.js) refuses most of it; `StrictParser` adds bounds, a few rules of RFC 9112, and
that upgrades are declined. For the server's connections (`http_server.py`) and for the router (`http_wire.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import httptools

MAX_HEAD_BYTES = 64 << 10
"""Of a request line with all headers, and of what a chunk brings beside its data."""

Headers = Sequence[tuple[bytes, bytes]]


class BadRequestError(Exception):
    """What came is no request that we take; `status` says how so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Receiver(Protocol):
    """Who is told of requests: of each head at once, of its body as it comes. May raise BadRequestError."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class StrictParser:
    """An `httptools.HttpRequestParser` that tells only of heads that are whole and clear, and of no trailers."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._idle_bytes = 0  # that came since a head began or was whole, or some of a body was there
        self.is_in_head = False

    def feed_data(self, data: bytes) -> None:
        """More of what a client sends. Raises BadRequestError, after which nothing may follow."""
        self._idle_bytes += len(data)
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                # llhttp takes the body for another protocol's: it reads the head again, without the offer
                data = self._head_without_offer() + data[offer.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                raise self._reason_of(error) from error
        if self._idle_bytes > MAX_HEAD_BYTES:
            raise BadRequestError(431, f"the head of the request, or of a chunk, is over {MAX_HEAD_BYTES} bytes")

    def close(self) -> None:
        """Nothing comes any more. Receiver and parsers hold one another, and would wait for the garbage collector."""
        del self._parser, self._receiver

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return False

    # -- told by httptools -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._idle_bytes = 0
        self.is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # else a trailer, which must not be taken for a header
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        _check_head(self.get_method(), self.get_http_version(), self._target, self._headers)
        if self._parser.should_upgrade():
            return
        self.is_in_head = False
        self._idle_bytes = 0
        self._receiver.on_message_begin()
        self._receiver.on_url(self._target)
        for name, value in self._headers:
            self._receiver.on_header(name, value)
        self._receiver.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        self._receiver.on_body(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._receiver.on_message_complete()

    def _reason_of(self, error: httptools.HttpParserError) -> BadRequestError:
        """Why httptools would not go on: a rule of ours, or one of its own. What is neither is a fault, and raised."""
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        if isinstance(cause, BadRequestError):
            return cause
        if isinstance(cause, httptools.HttpParserError):
            if self.get_method() == b"PRI":  # how a client of HTTP/2 begins that has not asked whether we speak it
                return _other_version(self.get_http_version())
            return BadRequestError(400, f"this is no HTTP/1.1 request: {cause}")
        raise cause or error

    def _head_without_offer(self) -> bytes:
        line = b"%b %b HTTP/%b" % (self.get_method(), self._target, self.get_http_version().encode())
        kept = [b"%b: %b" % header for header in self._headers if header[0].lower() != b"upgrade"]
        return b"\r\n".join([line, *kept, b"", b""])


def _check_head(method: bytes, version: str, target: bytes, headers: Headers) -> None:
    """Raises BadRequestError for a head that is too long, or unclear (RFC 9112)."""
    if len(target) > MAX_HEAD_BYTES:
        raise BadRequestError(414, f"the request's path is over {MAX_HEAD_BYTES} bytes")
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise BadRequestError(431, f"the head of the request is over {MAX_HEAD_BYTES} bytes")
    if version not in ("1.0", "1.1"):
        raise _other_version(version)
    if method == b"CONNECT":
        raise BadRequestError(501, "this server connects to nobody")
    if not target.startswith((b"/", b"*")) and httptools.parse_url(target).path is None:
        raise BadRequestError(400, "the request names no path")
    hosts = sum(name.lower() == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):  # section 3.2
        raise BadRequestError(400, f"the request has {hosts} Host headers, and should have one")
    codings = [value.strip().lower() for name, value in headers if name.lower() == b"transfer-encoding"]
    if codings and version == "1.0":  # section 6.1: such framing is faulty
        raise BadRequestError(400, "HTTP/1.0 knows no Transfer-Encoding")
    if codings not in ([], [b"chunked"]):
        raise BadRequestError(501, "the only Transfer-Encoding understood here is chunked")


def _other_version(version: str) -> BadRequestError:
    return BadRequestError(505, f"this is HTTP/{version}, and HTTP/1.1 is spoken here")
