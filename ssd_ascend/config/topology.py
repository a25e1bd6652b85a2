"""What a file of `topology/` says: the devices of a cluster, the links between them, what software adds, how to launch.

Read through `catalogue`, used by the planner. Levels go from the innermost out, and two devices talk over the first
level that holds both. `calibrated` is for a hardware probe: what it measured replaces what was published.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, Literal

from ssd_ascend.config.figures import Figure
from ssd_ascend.config.strict import FieldError, load_toml
from ssd_ascend.errors import ConfigError, nearest

NODE = "node"
"""The level that is one server with an operating system of its own; every topology has it."""
RankTableVersion = Literal["1.0", "1.2", "2.0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device: what one rank of a model runs on. Peaks are published; efficiencies say what of them is reached.

    `tflops` has a key for each number format: bf16, fp16, fp32, fp8, int8, fp4. `overlap`: how much of the shorter of
    reading weights and multiplying the longer one hides; left out, nothing is hidden. `shares_host` marks devices that
    are processes of one host (CPU): they share its memory, its bandwidth and its cores.
    """

    kind: str
    memory_gb: Figure
    memory_gbps: Figure
    tflops: Mapping[str, Figure]
    memory_efficiency: Figure
    compute_efficiency: Figure
    overlap: Figure | None = None
    shares_host: bool = False

    def __post_init__(self) -> None:
        known = ("bf16", "fp16", "fp32", "fp8", "int8", "fp4")
        for name in self.tflops:
            if name not in known:
                raise FieldError(f"unknown number format; known: {', '.join(known)}", "tflops", name)
        for name in ("memory_efficiency", "compute_efficiency", "overlap"):
            figure: Figure | None = getattr(self, name)
            if figure is not None and figure.value > 1.0:
                raise FieldError(f"{figure.value} is more than everything", name, remedy="give a share, 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """`fanout` instances of the level below, joined by one kind of link; rates are one way, for one device.

    `device_gbps` is to all peers together, `pair_gbps` to one of them. `reach` "scale_out" is a network between
    machines (RoCE, InfiniBand), which tensor parallelism never crosses. An absent number is not known.
    """

    fanout: int
    link: str
    shape: Literal["pair", "mesh", "switch"]
    source: str
    reach: Literal["scale_up", "scale_out"] = "scale_up"
    device_gbps: Figure | None = None
    pair_gbps: Figure | None = None
    latency_us: Figure | None = None
    efficiency: Figure | None = None
    allow_inversion: bool = False

    def __post_init__(self) -> None:
        if self.fanout < 1:
            raise FieldError(f"{self.fanout} instances", "fanout", remedy="give at least 1")
        if self.pair_gbps and self.device_gbps and self.pair_gbps.value > self.device_gbps.value:
            raise FieldError(
                f"one pair is given {self.pair_gbps.value} GB/s, more than the whole device's {self.device_gbps.value}",
                "pair_gbps",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Microseconds that no link and no memory explains. `draft_layer_us` is `layer_us` for drafts, whose matrices may
    be too small to fill a device (left out: the same). `step_us` and `sequence_us` are the host's work of a step and of
    each sequence in it, `round_us` comes on top where drafts are verified, `draft_step_us` on top of a draft step's
    layers; `branch_us` is a speculator's host work for a branch and round. `message_gbps` bounds what a message's bytes
    pass at when they go through the hosts' sockets."""

    message_us: Figure
    collective_us: Figure
    layer_us: Figure
    draft_layer_us: Figure | None = None
    eager_op_us: Figure | None = None
    step_us: Figure | None = None
    sequence_us: Figure | None = None
    draft_step_us: Figure | None = None
    branch_us: Figure | None = None
    round_us: Figure | None = None
    message_gbps: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedLink:
    """What a probe measured over one level."""

    pair_gbps: Figure | None = None
    latency_us: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was measured on such a machine; replaces the figures of the same name. Rates are reached ones, not peaks."""

    machine: str
    date: str
    memory_gbps: Figure | None = None
    tflops: Figure | None = None
    message_us: Figure | None = None
    collective_us: Figure | None = None
    layer_us: Figure | None = None
    draft_layer_us: Figure | None = None
    step_us: Figure | None = None
    sequence_us: Figure | None = None
    draft_step_us: Figure | None = None
    branch_us: Figure | None = None
    round_us: Figure | None = None
    message_gbps: Figure | None = None
    links: Mapping[str, CalibratedLink] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """`unit` devices are given out together (a package); the levels bound a tensor-parallel group and a speculator."""

    source: str
    unit: int
    tp_sizes: tuple[int, ...]
    tp_max_level: str
    speculator_max_level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How processes get there. `inventory_hint` is the command that prints what a rank table needs of each device.
    `peer_backend` is the backend whose devices read one another's memory inside a node; left out where none do."""

    collectives: str
    device_env: str
    ray_resource: str | None = None
    k8s_resource: str | None = None
    rank_table_versions: tuple[RankTableVersion, ...] = ()
    inventory_hint: str | None = None
    peer_backend: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One file of `topology/`. `devices` and `nodes` repeat what the fanouts multiply to, so that a slip shows."""

    name: str
    title: str
    vendor: str
    devices: int
    nodes: int
    sources: Mapping[str, str]
    device: Device
    levels: Mapping[str, Level]
    software: Software
    placement: PlacementRules
    launch: Launch
    calibrated: Calibrated | None = None

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_products()
        self._check_links()
        self._check_placement()

    @property
    def level_names(self) -> tuple[str, ...]:
        """Innermost first."""
        return tuple(self.levels)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Devices in one instance of each level, innermost first."""
        return tuple(accumulate((level.fanout for level in self.levels.values()), mul))

    def size_of(self, level: str) -> int:
        """Devices in one instance of `level`."""
        return self.level_sizes[self.level_names.index(level)]

    def _check_sources(self) -> None:
        for keys, source in _sources_of(self, ()):
            if source not in self.sources:
                guess = nearest(source, self.sources)
                raise FieldError(
                    f"source {source!r} is not in [sources]; known: {', '.join(self.sources)}",
                    *keys,
                    remedy=f"did you mean {guess!r}?" if guess else None,
                )

    def _check_products(self) -> None:
        if NODE not in self.levels:
            raise FieldError(f"no level {NODE!r}; there are {', '.join(self.levels) or 'none'}", "levels")
        fanouts = " x ".join(f"{level.fanout} ({name})" for name, level in self.levels.items())
        product = math.prod(level.fanout for level in self.levels.values())
        if product != self.devices:
            raise FieldError(f"{self.devices} devices, but the levels make {fanouts} = {product}", "devices")
        if self.devices != self.nodes * self.size_of(NODE):
            raise FieldError(
                f"{self.nodes} nodes of {self.size_of(NODE)} devices are {self.nodes * self.size_of(NODE)}, "
                f"but there are {self.devices}",
                "nodes",
            )

    def _check_links(self) -> None:
        """Farther is never faster: neither a rate nor a latency may improve from a level to the next one out."""
        for (inner_name, inner), (name, outer) in pairwise(self.levels.items()):
            if outer.allow_inversion:
                continue
            if inner.pair_gbps and outer.pair_gbps and outer.pair_gbps.value > inner.pair_gbps.value:
                key, text = "pair_gbps", f"{outer.pair_gbps.value} GB/s, more than {inner.pair_gbps.value}"
            elif inner.latency_us and outer.latency_us and outer.latency_us.value < inner.latency_us.value:
                key, text = "latency_us", f"{outer.latency_us.value} us, less than {inner.latency_us.value}"
            else:
                continue
            raise FieldError(
                f"{text} of the level inside it ({inner_name})", "levels", name, key, remedy="or set allow_inversion"
            )

    def _check_placement(self) -> None:
        rules, node = self.placement, self.size_of(NODE)
        for key in ("tp_max_level", "speculator_max_level"):
            if (level := getattr(rules, key)) not in self.levels:
                raise FieldError(f"no level {level!r}; there are {', '.join(self.levels)}", "placement", key)
        largest = self.size_of(rules.tp_max_level)
        if rules.unit < 1 or node % rules.unit:
            raise FieldError(f"a node of {node} is not made of units of {rules.unit}", "placement", "unit")
        if wrong := [size for size in rules.tp_sizes if not 1 <= size <= largest]:
            reason = f"{wrong[0]} devices do not fit a {rules.tp_max_level} of {largest}"
            raise FieldError(reason, "placement", "tp_sizes")
        for name in self.calibrated.links if self.calibrated else ():
            if name not in self.levels:
                raise FieldError(f"no level {name!r}; there are {', '.join(self.levels)}", "calibrated", "links", name)


def _sources_of(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path of keys, source) of every figure, level and rule below `value`."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(entry.name, getattr(value, entry.name)) for entry in dataclasses.fields(value)]
    else:
        return
    for name, inner in items:
        if name == "source" and isinstance(inner, str):
            yield ((*keys, name), inner)
        elif name != "sources":
            yield from _sources_of(inner, (*keys, name))


def load_topology(path: Path) -> Topology:
    """Read one topology file; ConfigError names the file, the line and the key."""
    topology = load_toml(path, Topology)
    if topology.name != path.stem:
        raise ConfigError(f"{path}: name: {topology.name!r} in a file called {path.name}", remedy="rename one of them")
    return topology
