"""The host-memory `Peer`: a gloo process group of two ranks, apart from the default group, made anew at will.

Why it is not the default line (see `link.py`): gloo ends the whole process when a peer sends more than was asked for.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from ssd_ascend.errors import TransportError, first_line

_TAG: Final = 0
_WAKE_TAG: Final = 1
_FOR_EVER: Final = timedelta(days=365)
_JOINED: Final = "joined"
_POLL_S: Final = 0.02


class GlooPeer:
    """The other of two ranks; see `p2p.Peer`."""

    def __init__(self, store: distributed.Store, rank: int, *, host: str, timeout_s: float) -> None:
        """Blocks until both ranks are there; TransportError when the other does not come in time."""
        self.device = torch.device("cpu")
        self._other = 1 - rank
        self._closing = threading.Lock()
        self._closed = False
        backend: Any = distributed.ProcessGroupGloo  # its point-to-point half is missing from the stubs
        options = backend._Options()
        options._devices = [backend.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            self._group = backend(store, rank, 2, options)
        except RuntimeError as error:
            raise TransportError(
                f"no link to rank {self._other} within {timeout_s:g} s: {first_line(error)[:200]}"
            ) from error

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """See `Peer.send`."""
        try:
            self._group.send([buffer], self._other, _TAG).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransportError(f"the other side is gone or does not read: {first_line(error)[:200]}") from error

    def recv(self, buffer: torch.Tensor) -> None:
        """See `Peer.recv`."""
        try:
            self._group.recv([buffer], self._other, _TAG).wait(_FOR_EVER)
        except RuntimeError as error:
            raise TransportError(f"the other side is gone: {first_line(error)[:200]}") from error

    def close(self) -> None:
        """See `Peer.close`. A wait that times out is the one thing that makes gloo close its pairs."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._other, _WAKE_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the point of it


def host_store(host: str, timeout_s: float) -> distributed.TCPStore:
    """The meeting place, on a port of the system's choice; lives as long as the object."""
    return distributed.TCPStore(host, 0, 2, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def wait_joined(store: distributed.Store, generation: int, timeout_s: float) -> bool:
    """Whether rank 1 of a generation comes to the meeting place in time, so that rank 0 need not block for it."""
    room = _room(store, generation)
    deadline = time.monotonic() + timeout_s
    while not room.check([_JOINED]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def join(store: distributed.Store, rank: int, generation: int, *, host: str, timeout_s: float) -> GlooPeer:
    """Meet the other rank of this generation."""
    room = _room(store, generation)
    if rank == 1:
        room.set(_JOINED, "1")
    return GlooPeer(room, rank, host=host, timeout_s=timeout_s)


def join_at(host: str, port: int, generation: int, *, timeout_s: float) -> GlooPeer:
    """Rank 1's way in: find the meeting place, meet rank 0."""
    try:
        store = distributed.TCPStore(host, port, 2, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(f"cannot reach the store at {host}:{port}: {first_line(error)[:200]}") from error
    return join(store, 1, generation, host=host, timeout_s=timeout_s)


def _room(store: distributed.Store, generation: int) -> distributed.PrefixStore:
    """Keys of one generation; those that a dead worker left behind belong to another."""
    return distributed.PrefixStore(f"speculator/{generation}", store)
