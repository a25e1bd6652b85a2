"""How fast a device copies and how much it holds: numbers to compare with its data sheet. Called by `report`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ssd_ascend.backends.base import Backend, Finding

_BYTES = 64 << 20
_SMALL = 4096
_ROUNDS = 10


def examine(backend: Backend, device: torch.device) -> Iterator[Finding]:
    """Memory, copies within the device and to and from the host, and the price of the smallest copy and launch."""
    free, total = backend.memory(device)
    yield Finding("memory", "measured", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    pinned = device.type != "cpu"
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=pinned)
    ours, other = (torch.zeros(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    for name, copy in (
        ("copy within the device", lambda: other.copy_(ours)),
        ("copy to the device", lambda: ours.copy_(host, non_blocking=True)),
        ("copy to the host", lambda: host.copy_(ours, non_blocking=True)),
    ):
        seconds = timed(backend, device, copy)
        yield Finding(name, "measured", f"{_BYTES / seconds / 1e9:.1f} GB/s in pieces of {_BYTES >> 20} MiB")
    small = torch.zeros(_SMALL, dtype=torch.uint8, device=device)
    yield Finding(
        "step's copy to the host", "measured", _micro(timed(backend, device, lambda: backend.to_host([small])))
    )
    yield Finding("smallest launch, and wait", "measured", _micro(timed(backend, device, lambda: small.zero_())))


def timed(backend: Backend, device: torch.device, run: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Median seconds of `run` with a wait behind it."""
    run()
    backend.synchronize(device)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        backend.synchronize(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[rounds // 2]


def timed_in_a_row(backend: Backend, device: torch.device, run: Callable[[], object], rounds: int) -> float:
    """Seconds of one `run` of `rounds` that follow each other with one wait behind all; a first is not counted."""
    run()
    backend.synchronize(device)
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    backend.synchronize(device)
    return (time.perf_counter() - began) / rounds


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
