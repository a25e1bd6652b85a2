"""Small sums over the ranks of one model, through memory the GPUs share: a third of what NCCL takes inside a graph.

Used where it is measured to be faster at start (`small_sums`, called by the builder through `base.SummingBackend`).
A rank that dies leaves no word: the kernel stops waiting when `abort` says so, or after a minute, and the sum is NaN.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import distributed

from ssd_ascend.backends.base import Collectives
from ssd_ascend.backends.cuda.graphs import CudaGraphs
from ssd_ascend.backends.cuda.kernels import all_reduce as kernel
from ssd_ascend.backends.cuda.peer_memory import PeerMemory
from ssd_ascend.errors import TransportError
from ssd_ascend.log import get_logger

_MOST_BYTES: Final = 512 << 10
"""Of one sum; larger ones are bound by the link, where the library does better."""
_MOST_RANKS: Final = 8
_TRIAL_BYTES: Final = 64 << 10
_TRIAL_SUMS: Final = 32
_TRIALS: Final = 5
_log = get_logger(__name__)


class SharedMemorySums:
    """See `base.SmallSums`."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, *, overlap: bool) -> None:
        """Called by all ranks of the group. TransportError where the devices share no memory."""
        self._rank, self._size, self._device, self._overlap = group.rank(), group.size(), device, overlap
        self._capacity = _MOST_BYTES // 4
        self._memory = PeerMemory(group, device, num_bytes=2 * self._size * self._capacity * 8)
        addresses = [block.data_ptr() for block in self._memory.blocks]
        self._inboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._turns = torch.zeros(self._capacity // kernel.WORDS, dtype=torch.int32, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)
        self._waker = torch.cuda.Stream(device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a sum of this size and kind can be had; all ranks say the same."""
        size = x.numel() * x.element_size()
        return 0 < size <= _MOST_BYTES and size % 4 == 0 and x.dtype in kernel.KINDS

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of contiguous `x` over ranks, in place."""
        kernel.all_reduce(
            x, self._inboxes, self._turns, self._broken, self._capacity,
            rank=self._rank, size=self._size, overlap=self._overlap,
        )  # fmt: skip
        return x

    def abort(self) -> None:
        """End all waiting, from any thread; every sum is NaN from then on."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._waker):
            self._broken.fill_(1)


def small_sums(collectives: Collectives, device: torch.device, *, overlap: bool) -> SharedMemorySums | None:
    """Where all ranks have it, and it is the faster one: measured here, by all of them together."""
    group = distributed.group.WORLD
    if collectives.size > _MOST_RANKS or group is None:
        return None
    try:
        sums = SharedMemorySums(group, device, overlap=overlap)
    except TransportError as error:
        _log.info("sums over ranks go through the library: %s", error)
        return None
    x = torch.ones(_TRIAL_BYTES // 2, dtype=torch.bfloat16, device=device)
    own_s = _seconds(lambda: sums.all_reduce(x), device)
    library_s = _seconds(lambda: collectives.all_reduce(x), device)
    verdict = collectives.broadcast(torch.tensor([own_s, library_s], device=device)).tolist()
    own_us, library_us = (1e6 * seconds for seconds in verdict)
    _log.info("a sum of %d KB over ranks: %.1f us in shared memory, %.1f us by the library", _TRIAL_BYTES >> 10,
              own_us, library_us)  # fmt: skip
    return sums if own_us < library_us else None


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, replayed in a graph of many."""

    def many() -> None:
        for _ in range(_TRIAL_SUMS):
            call()

    graph = CudaGraphs(device).capture(many)
    times = []
    for _ in range(_TRIALS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times) / _TRIAL_SUMS
