"""An `Exchange` without devices: buffers go through the store at which both sides meet."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import distributed

from ssd_ascend.errors import TransportError


class StoreExchange:
    """See `transport.device.Exchange`."""

    def __init__(self, store: distributed.Store, rank: int) -> None:
        self.device = torch.device("cpu")
        self._store, self._rank, self._sent, self._got = store, rank, 0, 0

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        self._store.set(f"{self._rank} {self._sent}", bytes(buffer.numpy()))
        self._sent += 1

    def recv(self, buffer: torch.Tensor, timeout_s: float) -> None:
        key, deadline = f"{1 - self._rank} {self._got}", time.monotonic() + timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TransportError("nothing came")
            time.sleep(0.001)
        buffer.copy_(torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.uint8))
        self._got += 1


def meet(store: distributed.Store, rank: int, index: int, timeout_s: float) -> StoreExchange:
    """As a backend's `meeting`."""
    store.set(f"device of {rank}", str(index))
    store.wait([f"device of {1 - rank}"], timedelta(seconds=timeout_s))
    return StoreExchange(store, rank)
