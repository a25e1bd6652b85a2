"""How many captured graphs a chip keeps, counted over all models of a process. Used by `graphs.py` and `backend.py`."""

from __future__ import annotations

import threading
from functools import cache

import torch

from ssd_ascend.log import get_logger

_log = get_logger(__name__)


class Slots:
    """How many graphs may be kept at a time, and are. From any thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._told = False
        self._lock = threading.Lock()

    @property
    def are_left(self) -> bool:
        """Whether one more may be kept."""
        return self.taken < self.limit

    def take(self) -> bool:
        """One for a graph; False when none is left."""
        with self._lock:
            if not self.are_left:
                return False
            self.taken += 1
            return True

    def give(self) -> None:
        """A graph is gone."""
        with self._lock:
            self.taken -= 1
            self._told = False

    def tell_once(self, device: torch.device) -> None:
        """Say that all are taken, unless that was said since they were."""
        with self._lock:
            told, self._told = self._told, True
        if not told:
            _log.warning(
                "NPU %d keeps at most %d captured graphs, and has as many: what comes now runs eagerly",
                device.index, self.limit,
            )  # fmt: skip


@cache
def slots_of(device: torch.device, limit: int) -> Slots:
    """Those of a device in this process, whoever captures: a target, its draft, a worker in a thread."""
    return Slots(limit)
