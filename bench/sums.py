"""How long a sum over two cards takes inside a graph, by the library and by the device's own way; are they the same?

Used by `bench/two_gpus.py`; both ranks run `_measure`, the first reports.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.summary import Row
from ssd_ascend.backends.base import Backend, SmallSums, SummingBackend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.distributed.collectives import GroupCollectives
from ssd_ascend.errors import SsdError
from ssd_ascend.probe.two_ranks import first_of_two, second_of_two

_KILOBYTES = (8, 64, 512)
_IN_A_ROW = 32
_REPEATS = 15


def sums(device_kind: str) -> list[Row]:
    """A row per size and way; a single one with the reason where there are no two devices."""
    backend = load_backend(device_kind)
    with contextlib.ExitStack() as ranks:
        try:
            group = ranks.enter_context(first_of_two(backend, entry=f"{__name__}:second"))
        except SsdError as error:
            return [{"mode": "sum", "skipped": str(error)}]
        return _measure(backend, backend.device(0), group)


def second(spec: Mapping[str, Any]) -> None:
    """The other rank."""
    second_of_two(spec, load_backend(spec["config"]["device"]), _measure)


def _measure(backend: Backend, device: torch.device, group: GroupCollectives) -> list[Row]:
    own = backend.small_sums(group, device) if isinstance(backend, SummingBackend) else None
    ways: Sequence[tuple[str, SmallSums | GroupCollectives]] = [("library", group)]
    ways = [*ways, ("shared memory", own)] if own is not None else ways
    rows: list[Row] = []
    for kilobytes in _KILOBYTES:
        draw = torch.Generator().manual_seed(group.rank)
        x = torch.randn(kilobytes << 9, generator=draw).to(torch.bfloat16).to(device)
        expected = group.all_reduce(x.clone())
        for name, way in ways:
            same = bool(torch.equal(way.all_reduce(x.clone()), expected))
            us = 1e6 * _in_a_graph(backend, device, way.all_reduce, x.clone())
            rows.append({"mode": "sum", "way": name, "kilobytes": kilobytes, "sum_us": round(us, 2), "exact": same})
    return rows


def _in_a_graph(
    backend: Backend, device: torch.device, call: Callable[[torch.Tensor], object], x: torch.Tensor
) -> float:
    """Seconds of one of many in a row; launch by launch where nothing is captured."""

    def many() -> None:
        for _ in range(_IN_A_ROW):
            call(x)

    graphs = None if backend.capabilities.host_memory else backend.graphs(device)
    run = many if graphs is None else graphs.capture(many).replay
    times = []
    for _ in range(_REPEATS):
        backend.synchronize(device)
        began = time.perf_counter()
        run()
        backend.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / _IN_A_ROW
