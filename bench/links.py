"""How long a message takes to a draft worker and back, by kind of line: two processes, packing and unpacking included.

Used by `bench/two_gpus.py`. Messages are those of a greedy round, bare or with an EAGLE-3 head's features; where
devices share memory, line "device" is a socket that carries the places of features instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.summary import Row
from ssd_ascend.backends.base import MeetingBackend, SharingBackend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.core.speculation import Source, VerificationOutcome
from ssd_ascend.errors import ConfigError, SsdError, TransportError
from ssd_ascend.speculation import worker_process
from ssd_ascend.transport import device_link
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.link import DEFAULT_KIND, DeviceLink, Link, Meeting, make_link
from ssd_ascend.transport.messages import Answer, Request, Shutdown, Update

_PATIENCE_S = 30.0
_LOOKAHEAD = 6


def round_trips(
    kinds: Sequence[str], device: torch.device, *, feature_width: int, batches: tuple[int, ...], repeats: int = 200
) -> list[Row]:
    """A row per kind of line, batch size and payload; a kind that cannot be had here leaves its reason."""
    rows: list[Row] = []
    for kind in kinds:
        try:
            rows += _of_kind(_link(kind, device), kind, device, feature_width, batches, repeats)
        except (SsdError, OSError) as error:
            rows.append({"mode": "round trip", "link": kind, "skipped": str(error)})
    return rows


def echo(transport: Transport, config: Mapping[str, Any]) -> None:
    """The worker's side: an answer to every request, at once."""
    while True:
        message = transport.recv(None)
        if not isinstance(message, Request):
            return
        rows = len(message.updates)
        transport.send(
            Answer(
                number=message.number,
                seq_ids=list(range(rows)),
                sources=[Source.HIT] * rows,
                drafts=[[0] * _LOOKAHEAD for _ in range(rows)],
                has_law=[False] * rows,
            )
        )


def _link(kind: str, device: torch.device) -> Link:
    """A line of this kind; "device" goes from `device` to the next of its kind."""
    if kind != device_link.KIND:
        return make_link(kind)
    backend = load_backend(device.type)
    if isinstance(backend, SharingBackend):
        return make_link(DEFAULT_KIND)
    if not isinstance(backend, MeetingBackend):
        raise ConfigError(f"{backend.name} has no line over devices")
    own = device.index or 0
    return DeviceLink(Meeting(backend.meeting, own, own + 1), 0)


def _of_kind(
    link: Link, kind: str, device: torch.device, feature_width: int, batches: tuple[int, ...], repeats: int
) -> list[Row]:
    shared = kind == device_link.KIND and isinstance(load_backend(device.type), SharingBackend)
    child = worker_process.start(f"{__name__}:echo", {}, link)
    rows: list[Row] = []
    try:
        line = _accepted(link, child)
        for batch in batches:
            for width in (0, feature_width):
                times = _ping(line, device, batch, width, repeats, shared=shared)
                rows.append(
                    {
                        "mode": "round trip",
                        "link": kind,
                        "batch": batch,
                        "feature_bytes": batch * (_LOOKAHEAD + 1) * width * 2,
                        "round_trip_us": round(1e6 * statistics.median(times), 1),
                        "round_trip_us_p99": round(1e6 * sorted(times)[int(0.99 * (len(times) - 1))], 1),
                    }
                )
        line.send(Shutdown())
        line.close()
    finally:
        link.close()
        child.kill()
        child.wait()
    return rows


def _accepted(link: Link, child: Any) -> Transport:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and child.poll() is None:
        line: Transport | None = link.accept(0.1)
        if line is not None:
            return line
    raise TransportError(f"no {link.address.kind} line within {_PATIENCE_S:.0f} s")


def _ping(line: Transport, device: torch.device, batch: int, width: int, repeats: int, *, shared: bool) -> list[float]:
    """Seconds of each round trip, after as many again to warm up, at most 50."""
    sends = bool(width) and not shared
    features = torch.zeros((_LOOKAHEAD + 1, width), dtype=torch.bfloat16, device=device) if sends else None
    slots = torch.zeros((_LOOKAHEAD + 1, 1), dtype=torch.int64) if width and shared else None
    times = []
    for number in range(1, repeats + min(repeats, 50) + 1):
        updates = [
            Update(
                outcome=VerificationOutcome(row, _LOOKAHEAD, 7),
                num_tokens_before=100,
                new_tokens=list(range(_LOOKAHEAD + 1)),
                features=features,
                slots=slots,
            )
            for row in range(batch)
        ]
        began = time.perf_counter()
        line.send(Request(number=number, updates=updates))
        if line.recv(_PATIENCE_S) is None:
            raise TransportError("the other side is silent")
        times.append(time.perf_counter() - began)
    return times[-repeats:]
