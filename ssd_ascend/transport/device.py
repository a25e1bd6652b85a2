"""The `Peer` of two devices of one kind: the device's own library carries the bytes, a socket says when.

A receive posted on a device waits on the device, and libraries give up waiting after minutes: an idle line would die.
So each buffer is announced on the socket first, and only then received; the socket also shows the other side's death
at once. The library itself is the backend's (`Exchange`); `link.py` brings both together.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final, Protocol

import torch

from ssd_ascend.errors import TransportError

_RING: Final = b"\x01"


class Exchange(Protocol):
    """One pair of processes with a device each. Each direction is on its own: a send never waits for a receive."""

    device: torch.device

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Returns once `buffer` may be reused; TransportError when the other side does not take it in time."""
        ...

    def recv(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Returns once `buffer` is full; what was announced must come in time, or it is a TransportError."""
        ...


class DevicePeer:
    """See `p2p.Peer`."""

    def __init__(self, exchange: Exchange, bell: socket.socket, *, timeout_s: float) -> None:
        """timeout_s: how long an announced buffer may take."""
        self.device = exchange.device
        self._exchange = exchange
        self._bell = bell
        self._timeout_s = timeout_s

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """See `Peer.send`."""
        try:
            self._bell.sendall(_RING)
        except OSError as error:
            raise TransportError(f"the other side is gone: {error.strerror or error}") from error
        self._exchange.send(buffer, timeout_s)

    def recv(self, buffer: torch.Tensor) -> None:
        """See `Peer.recv`."""
        try:
            rung = self._bell.recv(1)
        except OSError as error:
            raise TransportError(f"the line was closed: {error.strerror or error}") from error
        if not rung:
            raise TransportError("the other side is gone: it closed the line")
        self._exchange.recv(buffer, self._timeout_s)

    def close(self) -> None:
        """See `Peer.close`."""
        with contextlib.suppress(OSError):  # closed already, by either side
            self._bell.shutdown(socket.SHUT_RDWR)
