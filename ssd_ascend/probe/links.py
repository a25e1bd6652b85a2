"""Two processes on two devices of one kind: do messages and sums arrive, and how long do they take?

What ranks of a model and what target and draft worker say to each other. Called by `report`; `_rank` is where the
processes start.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ssd_ascend.backends.base import Backend, Finding
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.errors import ConfigError
from ssd_ascend.probe.rates import timed_in_a_row

_TIMEOUT_S = 180.0
_ROUNDS = 30
_SIZES = (64, 65536, 1 << 20)
_OFF = "serve on one device (--tp 1) and let messages go over sockets, as they do unless told otherwise"


def examine(backend: Backend) -> Iterator[Finding]:
    """Ping-pong of messages, and a sum; skipped where there is only one device."""
    try:
        backend.device(1)
    except ConfigError as error:
        yield Finding("two ranks", "skipped", error.message)
        return
    finally:
        backend.device(0)
    with tempfile.TemporaryDirectory(prefix="ssd-links-") as folder:
        try:
            yield from _spawn(backend.name, Path(folder))
        except (RuntimeError, OSError, ProcessRaisedException, ProcessExitedException) as error:
            yield Finding("two ranks", "failed", str(error).strip().splitlines()[-1], _OFF)


def _spawn(name: str, folder: Path) -> Iterator[Finding]:
    context: Any = multiprocessing.spawn(_rank, (name, str(folder)), nprocs=2, join=False)
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the two ranks did not finish within {_TIMEOUT_S:.0f} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    for line in json.loads((folder / "findings.json").read_text(encoding="utf-8")):
        yield Finding(*line)


def _rank(rank: int, name: str, folder: str) -> None:
    """One process."""
    backend = load_backend(name)
    device = backend.device(rank)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group(
        backend.collective, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_TIMEOUT_S)
    )
    findings = [_ping(backend, device, rank, size) for size in _SIZES]
    findings.append(_sum(backend, device, rank))
    if rank == 0:
        Path(folder, "findings.json").write_text(json.dumps(findings), encoding="utf-8")
    distributed.barrier()
    backend.synchronize(device)
    distributed.destroy_process_group()


def _ping(backend: Backend, device: torch.device, rank: int, size: int) -> Finding:
    """There and back; what comes back must be what went."""
    message = torch.arange(size, device=device).to(torch.uint8)
    received = torch.zeros_like(message)

    def turn() -> None:
        if rank == 0:
            distributed.send(message, 1)
            distributed.recv(received, 1)
        else:
            distributed.recv(received, 0)
            distributed.send(received, 0)

    seconds = timed_in_a_row(backend, device, turn, _ROUNDS)
    right = torch.equal(received.cpu(), message.cpu())
    detail = f"{seconds / 2 * 1e6:.0f} us one way" if right else "another message arrived"
    return Finding(f"send and receive, {size} bytes", "ok" if right else "failed", detail, "" if right else _OFF)


def _sum(backend: Backend, device: torch.device, rank: int) -> Finding:
    """What each layer of a model on two ranks does twice."""
    x = torch.full((8, 4096), float(rank + 1), dtype=backend.capabilities.dtypes[0], device=device)
    distributed.all_reduce(x)
    right = bool((x.float() == 3.0).all().item())
    seconds = timed_in_a_row(backend, device, lambda: distributed.all_reduce(torch.zeros_like(x)), _ROUNDS)
    detail = f"{seconds * 1e6:.0f} us for 8 rows of 4096" if right else "the sum is wrong"
    return Finding("sum over two ranks", "ok" if right else "failed", detail, "" if right else _OFF)
