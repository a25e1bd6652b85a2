"""Requests that two readers of HTTP might understand differently (RFC 9112), and what is to be said of each.

For the server (`test_strangers.py`) and the router (`test_router_wire.py`), which must agree.
"""

from __future__ import annotations

_HOST = b"Host: x\r\n"


def get(headers: bytes = _HOST, *, line: bytes = b"GET /health HTTP/1.1") -> bytes:
    return line + b"\r\n" + headers + b"\r\n"


def post(headers: bytes, body: bytes = b"abc") -> bytes:
    return b"POST /tokenize HTTP/1.1\r\n" + _HOST + headers + b"\r\n" + body


def chunked(body: bytes, coding: bytes = b"chunked") -> bytes:
    return post(b"Transfer-Encoding: " + coding + b"\r\n", body)


REFUSED: dict[str, tuple[bytes, int]] = {
    "both framings": (post(b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n"), 400),
    "both, turned": (post(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"), 400),
    "two lengths": (post(b"Content-Length: 3\r\nContent-Length: 4\r\n"), 400),
    "a length twice": (post(b"Content-Length: 3\r\nContent-Length: 3\r\n"), 400),
    "a list of lengths": (post(b"Content-Length: 3, 3\r\n"), 400),
    "a length with a sign": (post(b"Content-Length: +3\r\n"), 400),
    "a negative length": (post(b"Content-Length: -1\r\n"), 400),
    "a length in hex": (post(b"Content-Length: 0x3\r\n"), 400),
    "no length": (post(b"Content-Length: \r\n"), 400),
    "a length of 5000 digits": (post(b"Content-Length: " + b"9" * 5000 + b"\r\n"), 400),
    "a folded line": (get(_HOST + b"X: a\r\n b\r\n"), 400),
    "a folded coding": (post(b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n"), 400),
    "line feeds alone": (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
    "one line feed alone": (get(b"Host: x\nX: y\r\n"), 400),
    "a carriage return alone": (get(_HOST + b"X: a\rb\r\n"), 400),
    "space before a colon": (post(b"Content-Length : 3\r\n"), 400),
    "space before a name": (get(b" Host: x\r\n"), 400),
    "no colon": (get(_HOST + b"Xy\r\n"), 400),
    "a control character": (get(_HOST + b"X: a\x01b\r\n"), 400),
    "no host": (get(b""), 400),
    "two hosts": (get(_HOST + b"Host: y\r\n"), 400),
    "another coding": (chunked(b"0\r\n\r\n", b"gzip, chunked"), 501),
    "no coding": (chunked(b"0\r\n\r\n", b"identity"), 501),
    "chunked twice": (chunked(b"0\r\n\r\n", b"chunked, chunked"), 400),
    "chunks in HTTP/1.0": (chunked(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    "a chunk with a sign": (chunked(b"+3\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk in hex": (chunked(b"0x3\r\nabc\r\n0\r\n\r\n"), 400),
    "a chunk after a line feed alone": (chunked(b"3\nabc\r\n0\r\n\r\n"), 400),
    "a chunk longer than it says": (chunked(b"3\r\nabcXX0\r\n\r\n"), 400),
    "a chunk beyond all numbers": (chunked(b"10000000000000003\r\nabc\r\n0\r\n\r\n"), 400),
    "a line feed in an extension": (chunked(b"3;a\nb\r\nabc\r\n0\r\n\r\n"), 400),
    "a length in a trailer": (chunked(b"0\r\nContent-Length: 9\r\n\r\n"), 400),
    "a trailer after a line feed alone": (chunked(b"0\r\nX: y\n\n"), 400),
    "a host without a path": (get(line=b"GET http://y HTTP/1.1"), 400),
    "a host that is none": (get(line=b"GET http://[::1 HTTP/1.1"), 400),
    "a tunnel": (get(line=b"CONNECT y:443 HTTP/1.1"), 501),
    "an older version": (get(line=b"GET /health HTTP/0.9"), 505),
    "a newer version": (get(line=b"GET /health HTTP/2.0"), 505),
    "HTTP/2 unasked": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a path of 100 KB": (get(line=b"GET /" + b"a" * 100_000 + b" HTTP/1.1"), 414),
    "a header of 100 KB": (get(_HOST + b"X: " + b"a" * 100_000 + b"\r\n"), 431),
    "a thousand headers of 100 B": (get(_HOST + (b"X: " + b"a" * 95 + b"\r\n") * 1000), 431),
    "an endless header": (b"GET /health HTTP/1.1\r\nX: " + b"a" * 500_000, 431),
    "an endless extension": (chunked(b"3;" + b"a" * 800_000), 431),
    "an endless trailer": (chunked(b"0\r\nX: " + b"a" * 800_000), 431),
}

ALLOWED: dict[str, bytes] = {
    "a body of chunks": chunked(b"3\r\nabc\r\n0\r\n\r\n"),
    "an extension": chunked(b"3;a=b\r\nabc\r\n0\r\n\r\n"),
    "a trailer": chunked(b"3\r\nabc\r\n0\r\nHost: y\r\n\r\n"),
    "empty lines before": b"\r\n\r\n" + get(),
    "a header of 60 KB": get(_HOST + b"X: " + b"a" * 60_000 + b"\r\n"),
    "an upgrade": get(_HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"),
    "an upgrade with a body": post(b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n"),
}
