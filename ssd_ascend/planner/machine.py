"""The geometry of a cluster: devices 0..N-1 in physical order, grouped by levels. For placement, tables, pictures."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_ascend.config.topology import NODE, Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """Names and sizes of the levels, innermost first. An instance of a level is a run of `size` devices."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology) -> Machine:
        """The geometry of a topology."""
        return cls(topology.level_names, topology.level_sizes)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.sizes[-1]

    @property
    def node_size(self) -> int:
        """Devices of one server."""
        return self.size(NODE)

    def size(self, level: str) -> int:
        """Devices in one instance of `level`."""
        return self.sizes[self.names.index(level)]

    def inner_size(self, level: str) -> int:
        """Devices in one instance of the level inside `level`; 1 for the innermost."""
        index = self.names.index(level)
        return self.sizes[index - 1] if index else 1

    def level_holding(self, count: int) -> str:
        """The innermost level with `count` devices."""
        return next(name for name, size in zip(self.names, self.sizes, strict=True) if size >= count)

    def level_between(self, a: int, b: int) -> str:
        """The first level that holds both devices: they talk over its links."""
        return next(name for name, size in zip(self.names, self.sizes, strict=True) if a // size == b // size)

    def outward(self, *, start: str, end: str) -> tuple[str, ...]:
        """The levels from `start` to `end`, both included, innermost first."""
        return self.names[self.names.index(start) : self.names.index(end) + 1]

    def is_farther(self, level: str, than: str) -> bool:
        """Whether `level` lies outside `than`."""
        return self.names.index(level) > self.names.index(than)

    def where_node(self, node: int) -> str:
        """A node in words: "rack 3, node 27"; one that is alone has no number."""
        first = node * self.node_size
        around = [(n, s) for n, s in zip(self.names, self.sizes, strict=True) if self.node_size <= s < self.devices]
        return ", ".join(f"{name} {first // size}" for name, size in reversed(around)) or NODE

    def where(self, device: int) -> str:
        """A device in words, outermost level first: "node 2, package 3, device 37"."""
        parts = []
        for name, size, around in zip(self.names, self.sizes, (*self.sizes[1:], self.devices), strict=True):
            if self.devices // size > 1:
                parts.append(f"{name} {device // size if size >= self.node_size else device % around // size}")
        return ", ".join([*reversed(parts), f"device {device}"])
