"""How the two ends of a line over devices find each other: a store to meet at, and a socket pair for the bell.

`link.py` hands the address on; the backend's `meeting` ("module:function") connects the devices themselves.
"""

from __future__ import annotations

import importlib
import socket
import time
from datetime import timedelta
from typing import Any, Final

from torch import distributed

from ssd_ascend.errors import TransportError, first_line
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.device import DevicePeer
from ssd_ascend.transport.p2p import P2PTransport

KIND: Final = "device"
_HERE: Final = "here"
_POLL_S: Final = 0.02


class Host:
    """The target's side, until the worker has come."""

    def __init__(self, host: str, generation: int, timeout_s: float) -> None:
        self._store = distributed.TCPStore(host, 0, 2, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        self._room = _room(self._store, generation)
        self._timeout_s = timeout_s
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._taken = False

    @property
    def fd(self) -> int:
        """The worker's end of the bell."""
        return self._theirs.fileno()

    @property
    def port(self) -> int:
        """Of the store."""
        return int(self._store.port)

    def accept(self, entry: str, device: int, timeout_s: float) -> Transport | None:
        """See `link.Link`: None while the worker is not there."""
        deadline = time.monotonic() + timeout_s
        while not self._room.check([_HERE]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        self._theirs.close()  # or we would never see the worker's end of file
        self._taken = True
        return _line(entry, self._room, 0, device, self._ours, self._timeout_s)

    def close(self) -> None:
        """Give up waiting."""
        self._theirs.close()
        if not self._taken:
            self._ours.close()


def connect(host: str, port: int, generation: int, fd: int, entry: str, device: int, *, timeout_s: float) -> Transport:
    """The worker's side."""
    try:
        store = distributed.TCPStore(host, port, 2, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(f"cannot reach the store at {host}:{port}: {first_line(error)}") from error
    room = _room(store, generation)
    room.set(_HERE, "1")
    return _line(entry, room, 1, device, socket.socket(fileno=fd), timeout_s)


def _line(
    entry: str, room: distributed.Store, rank: int, device: int, bell: socket.socket, timeout_s: float
) -> Transport:
    module, _, name = entry.partition(":")
    meet: Any = getattr(importlib.import_module(module), name)
    return P2PTransport(DevicePeer(meet(room, rank, device, timeout_s), bell, timeout_s=timeout_s))


def _room(store: distributed.Store, generation: int) -> distributed.PrefixStore:
    """Keys of one generation; those that a dead worker left behind belong to another."""
    return distributed.PrefixStore(f"device/{generation}", store)
