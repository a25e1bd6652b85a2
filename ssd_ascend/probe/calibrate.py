"""What the planner wants to know of this machine: how fast weights stream, products run, messages and sums go.

`python -m ssd_ascend.plan TOPOLOGY --calibrate FILE` calls `measure`. Two devices are needed for what is between them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.topology import Topology
from ssd_ascend.core.speculation import VerificationOutcome
from ssd_ascend.distributed.collectives import GroupCollectives
from ssd_ascend.errors import ConfigError, TransportError
from ssd_ascend.planner.calibration import Measured
from ssd_ascend.probe.rates import timed, timed_in_a_row
from ssd_ascend.probe.two_ranks import first_of_two, second_of_two
from ssd_ascend.speculation import worker_process
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.link import make_link
from ssd_ascend.transport.messages import Request, Update

_HOST_BYTES: Final = 128 << 20
_DEVICE_BYTES: Final = 2 << 30
"""Several times what a cache holds."""
_MATRICES: Final = 4
_ROWS: Final = 512
_MESSAGES, _LARGE_MESSAGES, _SUMS, _SUM_BYTES, _LARGE_BYTES = 200, 40, 50, 16 << 10, 32 << 20
_FEATURES, _FEATURE_WIDTH = 128, 3 * 4096
"""Tokens whose features travel, and numbers of each: an EAGLE-3 head's round with 16 sequences."""
_START_S: Final = 120.0


class Devices(NamedTuple):
    """What this machine has. share_host: they are processes on its processors."""

    what: str
    share_host: bool


def devices() -> Devices:
    """The best that this machine has, which is what would be measured."""
    backend = load_backend(None)
    return Devices(backend.describe(backend.device(0)), backend.capabilities.host_memory)


def measure(topology: Topology) -> Measured:
    """Measure this machine for a topology whose devices it has; ConfigError when it has none."""
    backend = load_backend("cpu" if topology.device.shares_host else None)
    device = backend.device(0)
    if backend.capabilities.host_memory and not topology.device.shares_host:
        raise ConfigError(
            f"{topology.name} is of devices ({topology.device.kind}), and this machine has none",
            remedy="measure on a machine that has them",
        )
    figures, notes = {}, {}
    with torch.inference_mode():
        figures["memory_gbps"], notes["memory_gbps"] = _streaming(backend, device)
        figures["tflops"], notes["tflops"] = _products(backend, device)
    figures["message_us"], figures["message_gbps"] = _messages()
    notes["message_us"] = "half of a round trip between two processes, packed and unpacked"
    megabytes = _FEATURES * _FEATURE_WIDTH * 2 >> 20
    notes["message_gbps"] = f"{megabytes} MB of features there and back, less an empty message"
    links: dict[str, dict[str, float]] = {}
    with contextlib.suppress(ConfigError):  # there is one device only
        backend.device(1)
        with first_of_two(backend, entry=f"{__name__}:second") as group:
            figures["collective_us"], gbps = _exchange(backend, backend.device(0), group)
        notes["collective_us"] = f"one sum of {_SUM_BYTES >> 10} KB over two devices"
        links[next(iter(topology.levels))] = {"pair_gbps": gbps}
        notes["pair_gbps"] = f"broadcasts of {_LARGE_BYTES >> 20} MB"
    return Measured(
        machine=backend.describe(device), date=time.strftime("%Y-%m-%d"), figures=figures, links=links, notes=notes
    )


def _streaming(backend: Backend, device: torch.device) -> tuple[float, str]:
    """GB/s at which a token's forward reads weights: one row through matrices larger than any cache."""
    size = _HOST_BYTES if backend.capabilities.host_memory else _DEVICE_BYTES
    dtype = backend.capabilities.dtypes[0]
    side = 4096
    rows = size // _MATRICES // dtype.itemsize // side
    linears = [backend.ops.linear(_weight(rows, side, dtype, device), None) for _ in range(_MATRICES)]
    x = torch.ones(1, side, dtype=_activations(backend, dtype), device=device)

    def run() -> None:
        for linear in linears:
            linear(x)

    seconds = timed(backend, device, run)
    return size / seconds / 1e9, f"{size >> 20} MB of {str(dtype).removeprefix('torch.')} weights at one row"


def _products(backend: Backend, device: torch.device) -> tuple[float, str]:
    """TFLOP/s of many rows through one matrix."""
    dtype = backend.capabilities.dtypes[0]
    side = 1024 if backend.capabilities.host_memory else 8192
    rows = _ROWS // 4 if backend.capabilities.host_memory else 16 * _ROWS
    linear = backend.ops.linear(_weight(side, side, dtype, device), None)
    x = torch.ones(rows, side, dtype=_activations(backend, dtype), device=device)
    seconds = timed(backend, device, lambda: linear(x))
    return 2.0 * rows * side * side / seconds / 1e12, f"{rows} rows through {side} x {side}"


def _weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device).mul_(columns**-0.5).to(dtype)


def _activations(backend: Backend, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if backend.capabilities.wide_activations else dtype


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages() -> tuple[float, float]:
    """(microseconds of one message of a greedy round, GB/s of what is in a large one), to a process of its own."""
    with contextlib.closing(make_link()) as link:
        child = worker_process.start(f"{__name__}:echo", {}, link)
        try:
            line = link.accept(_START_S)
            assert line is not None, "a socket pair is there at once"
            with contextlib.closing(line):
                empty_s = _round_trip_s(line, Request(number=0), _MESSAGES)
                features = torch.zeros(_FEATURES, _FEATURE_WIDTH, dtype=torch.bfloat16)
                outcome = VerificationOutcome(0, 0, 0)
                update = Update(
                    outcome=outcome, num_tokens_before=0, new_tokens=[0] * _FEATURES, features=features
                )  # fmt: skip
                more_s = _round_trip_s(line, Request(number=0, updates=[update]), _LARGE_MESSAGES) - empty_s
                return empty_s / 2.0 * 1e6, 2.0 * features.nbytes / max(more_s, 1e-9) / 1e9
        finally:
            child.kill()
            child.wait()


def _round_trip_s(line: Transport, message: Request, times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        line.send(message)
        if line.recv(_START_S) is None:
            raise TransportError(f"the other process said nothing for {_START_S:g} s")
        taken.append(time.perf_counter() - began)
    return sorted(taken)[times // 2]


def echo(line: Transport, config: Mapping[str, Any]) -> None:
    """The other process: what comes goes back, until the line ends."""
    while (message := line.recv(None)) is not None:
        line.send(message)


# -- sums --------------------------------------------------------------------------------------------------------------


def _exchange(backend: Backend, device: torch.device, group: GroupCollectives) -> tuple[float, float]:
    """(microseconds of a small sum, GB/s of a large broadcast) between two devices."""
    small = torch.zeros(_SUM_BYTES // 4, device=device)
    large = torch.zeros(_LARGE_BYTES // 4, device=device)
    small_s = timed_in_a_row(backend, device, lambda: group.all_reduce(small), _SUMS)
    large_s = timed_in_a_row(backend, device, lambda: group.broadcast(large), 5)
    return small_s * 1e6, _LARGE_BYTES / large_s / 1e9


def second(spec: Mapping[str, Any]) -> None:
    """The second of two ranks."""
    second_of_two(spec, load_backend(spec["config"]["device"]), _exchange)
