"""Lines between hosts: a listener, `connect`, and the proof that both know one secret before the first message.

The listener asks first and shows nothing to a caller that cannot answer. The secret admits a peer; it does not
encrypt, so use a network you trust or a tunnel. `link.py` uses this for a worker of our own, `distributed/control.py`
takes the bare sockets.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import struct
import time
from typing import Final

from ssd_ascend.errors import TransportError
from ssd_ascend.transport.frame import MAX_MESSAGE_BYTES, WIRE_VERSION
from ssd_ascend.transport.socket import SEND_TIMEOUT_S, SocketTransport

LEAST_SECRET: Final = 16
"""Characters."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""What a caller that connects and then says nothing can cost a listener."""
_GREETING: Final = struct.Struct("=4sI32s")
_MAGIC: Final = b"SSDT"
_NONCE_BYTES: Final = 32
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A host that vanishes without a word is noticed after about 11 s even when nothing is under way."""

_OVER: Final = frozenset({
    errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET,
})  # fmt: skip
"""What `accept` reports of callers who were gone, or kept out by the system, before they were taken: accept(2)."""

UNACKNOWLEDGED_S: Final = 3.0
"""A host that acknowledges nothing for so long is cut off. One whose process is busy still does, so it is not."""


def new_secret() -> str:
    """A secret nobody guesses, as text for a config file."""
    return secrets.token_hex(32)


class Listener:
    """Waits for peers on one address; `port` 0 lets the system choose."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        *,
        limit: int = MAX_MESSAGE_BYTES,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        _check_secret(secret)
        self._secret = secret.encode()
        self._limit = limit
        self._send_timeout_s = send_timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout_s: float) -> SocketTransport | None:
        """The next peer that proves the secret, or None; who cannot is dropped, and the wait goes on.

        TransportError when nobody can be taken now: the system is out of files, say, or the listener was closed.
        """
        sock = self.accept_socket(timeout_s)
        if sock is None:
            return None
        try:
            return SocketTransport(sock, send_timeout_s=self._send_timeout_s, limit=self._limit)
        except OSError:  # the caller has hung up
            sock.close()
            return None

    def accept_socket(self, timeout_s: float) -> socket.socket | None:
        """The same, for who speaks something else than messages."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0.0:
            self._socket.settimeout(left)
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                return None
            except OSError as error:
                if error.errno in _OVER:
                    continue
                raise TransportError(f"port {self.port} takes nobody: {error}") from error
            try:
                _ask_then_show(sock, self._secret)
                return _tuned(sock)
            except (OSError, TransportError):  # a port scanner, an old release, a wrong secret: not our peer
                sock.close()
        return None

    def close(self) -> None:
        """Stop listening; peers that were accepted keep their lines."""
        self._socket.close()


def connect(
    host: str, port: int, secret: str, *, timeout_s: float, send_timeout_s: float = SEND_TIMEOUT_S
) -> SocketTransport:
    """Connect to a `Listener`; TransportError when nobody answers in time or the secrets differ."""
    return SocketTransport(connect_socket(host, port, secret, timeout_s=timeout_s), send_timeout_s=send_timeout_s)


def connect_socket(host: str, port: int, secret: str, *, timeout_s: float) -> socket.socket:
    """The same, for who speaks something else than messages."""
    _check_secret(secret)
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise TransportError(f"cannot reach {where}: {error}", remedy="is it running, and is the port open?") from error
    try:
        _show_then_ask(sock, secret.encode())
    except (OSError, TransportError) as error:
        sock.close()
        raise TransportError(f"{where} did not let us in: {error}", remedy="compare secret and release") from error
    return _tuned(sock)


def _check_secret(secret: str) -> None:
    if len(secret) < LEAST_SECRET:
        raise TransportError(
            f"a secret of {len(secret)} characters", remedy=f"use {LEAST_SECRET} or more, e.g. tcp.new_secret()"
        )


def _ask_then_show(sock: socket.socket, secret: bytes) -> None:
    """The listener's half."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    ours = _greet(sock, deadline)
    theirs = _greeted(sock, deadline)
    _expect(_take(sock, 32, deadline), _proof(secret, b"caller", ours, theirs))
    sock.sendall(_proof(secret, b"listener", ours, theirs))


def _show_then_ask(sock: socket.socket, secret: bytes) -> None:
    """The caller's half."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    theirs = _greeted(sock, deadline)
    ours = _greet(sock, deadline)
    sock.sendall(_proof(secret, b"caller", theirs, ours))
    _expect(_take(sock, 32, deadline), _proof(secret, b"listener", theirs, ours))


def _proof(secret: bytes, role: bytes, listener_nonce: bytes, caller_nonce: bytes) -> bytes:
    """Bound to both nonces, so that it proves nothing twice, and to the role, so that it cannot be sent back."""
    return hmac.digest(secret, role + listener_nonce + caller_nonce, "sha256")


def _expect(got: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(got, wanted):
        raise TransportError("the secrets differ")


def _greet(sock: socket.socket, deadline: float) -> bytes:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_GREETING.pack(_MAGIC, WIRE_VERSION, nonce))
    return nonce


def _greeted(sock: socket.socket, deadline: float) -> bytes:
    magic, version, nonce = _GREETING.unpack(_take(sock, _GREETING.size, deadline))
    if magic != _MAGIC:
        raise TransportError(f"greeting {magic!r}: expected {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise TransportError(f"wire version {version} there, {WIRE_VERSION} here")
    return bytes(nonce)


def _take(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes; the deadline holds for all of them together, not for each piece."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0.0:
            raise TransportError(f"no greeting within {HANDSHAKE_TIMEOUT_S:g} s")
        sock.settimeout(left)
        piece = sock.recv(size - len(data))
        if not piece:
            raise TransportError("the other side hung up")
        data += piece
    return data


def _tuned(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)  # the handshake had one
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000.0 * UNACKNOWLEDGED_S))
    return sock
