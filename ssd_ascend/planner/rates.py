"""What a device and its links reach: published peaks times efficiencies, or what a probe measured. For `cost`."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ssd_ascend.config.figures import Figure
from ssd_ascend.config.topology import NODE, Level, Topology
from ssd_ascend.errors import ConfigError

_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_GBPS = 1e3  # 1 GB/s in bytes per microsecond
_TFLOPS = 1e6  # 1 TFLOP/s in operations per microsecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of links: bytes per microsecond one way, and the wire's latency. `assumed` marks a borrowed rate."""

    pair: float
    device: float
    latency_us: float
    fanout: int
    is_mesh: bool
    assumed: bool = False

    def group_rate(self, members: int) -> float:
        """Bytes per microsecond a device reaches towards the `members - 1` others of its group."""
        if self.is_mesh and 1 < members <= self.fanout:
            return self.device * (members - 1) / max(1, self.fanout - 1)
        return self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Reached rates, in bytes and operations per microsecond; overheads in microseconds. `socket` bounds a message's
    bytes whatever the link, None where nothing does; over the levels of `peers` devices read one another's memory. The
    figures' meanings are told in `config/topology.py`."""

    memory: float
    compute: float
    overlap: float
    message_us: float
    collective_us: float
    layer_us: float
    draft_layer_us: float
    step_us: float
    sequence_us: float
    draft_step_us: float
    branch_us: float
    round_us: float
    socket: float | None
    links: dict[str, Link]
    shares_host: bool
    peers: frozenset[str]

    def all_reduce_us(self, size: float, members: int, level: str) -> float:
        """One all-reduce of `size` bytes: a start-up, then the better of ring and tree (alpha-beta model)."""
        link = self.links[level]
        rate = link.group_rate(members)
        ring = 2 * (members - 1) / members * size / rate
        tree = 2 * log2(members) * link.latency_us + 2 * size / rate
        return self.collective_us + min(ring, tree)

    def gather_us(self, size: float, level: str, members: int) -> float:
        """Gathering `size` bytes in all onto every member."""
        return self.collective_us + size / self.links[level].group_rate(members)


def rates_of(topology: Topology, dtype: str) -> Rates:
    """The rates of a topology for weights of `dtype`; ConfigError when the device has no such arithmetic."""
    device, software, measured = topology.device, topology.software, topology.calibrated
    name = _FORMATS[dtype]
    if name not in device.tflops:
        known = ", ".join(device.tflops)
        raise ConfigError(f"{topology.name}: no rate for {dtype} on a {device.kind}; there are {known}")

    def overhead(key: str, default: float = 0.0) -> float:
        figure = _first(getattr(measured, key, None), getattr(software, key))
        return figure.value if figure else default

    memory = measured.memory_gbps.value if measured and measured.memory_gbps else None
    compute = measured.tflops.value if measured and measured.tflops else None
    layer_us = overhead("layer_us")
    socket = _first(measured.message_gbps if measured else None, software.message_gbps)
    eager = software.eager_op_us.value if software.eager_op_us else 0.0
    return Rates(
        memory=_GBPS * (memory or device.memory_gbps.value * device.memory_efficiency.value),
        compute=_TFLOPS * (compute or device.tflops[name].value * device.compute_efficiency.value),
        overlap=device.overlap.value if device.overlap else 0.0,
        message_us=max(overhead("message_us"), eager),  # messages are posted outside any graph
        collective_us=overhead("collective_us"),
        layer_us=layer_us,
        draft_layer_us=overhead("draft_layer_us", layer_us),
        step_us=overhead("step_us"),
        sequence_us=overhead("sequence_us"),
        draft_step_us=overhead("draft_step_us"),
        branch_us=overhead("branch_us"),
        round_us=overhead("round_us"),
        socket=socket.value * _GBPS if socket else None,
        links=_links(topology),
        shares_host=device.shares_host,
        peers=_peers(topology),
    )


def _peers(topology: Topology) -> frozenset[str]:
    """Levels within a node, where its devices read one another's memory."""
    if topology.launch.peer_backend is None:
        return frozenset()
    names = topology.level_names
    return frozenset(names[: names.index(NODE) + 1])


def _first(*figures: Figure | None) -> Figure | None:
    return next((figure for figure in figures if figure is not None), None)


def _links(topology: Topology) -> dict[str, Link]:
    """Every level's link; a rate that nobody published is taken from the level inside, and marked."""
    links: dict[str, Link] = {}
    inner: Link | None = None
    for name, level in topology.levels.items():
        inner = links[name] = _link(topology, name, level, inner)
    return links


def _link(topology: Topology, name: str, level: Level, inner: Link | None) -> Link:
    measured = topology.calibrated.links.get(name) if topology.calibrated else None
    efficiency = level.efficiency.value if level.efficiency else 1.0
    pair: float | None = None
    if measured is not None and measured.pair_gbps is not None:
        pair = measured.pair_gbps.value * _GBPS
    elif level.pair_gbps is not None:
        pair = level.pair_gbps.value * efficiency * _GBPS
    if pair is None and inner is None:
        reason = f"{topology.name}: no rate is known for the innermost level {name!r}"
        raise ConfigError(reason, remedy="give pair_gbps")
    known = pair if pair is not None else inner.pair if inner is not None else 0.0
    latency = _first(measured.latency_us if measured else None, level.latency_us)
    return Link(
        pair=known,
        device=level.device_gbps.value * efficiency * _GBPS if level.device_gbps else known,
        latency_us=latency.value if latency else (inner.latency_us if inner else 0.0),
        fanout=level.fanout,
        is_mesh=level.shape == "mesh",
        assumed=pair is None,
    )
