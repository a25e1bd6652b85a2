"""The addresses of real machines, which a rank table needs and no topology knows. Read from a TOML file by `plan.py`.

One [[servers]] per node of the topology, in its order; [[servers.devices]] in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssd_ascend.config.strict import load_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One network address of a device (rank table 2.0): layer 0 is the innermost network."""

    layer: int
    instance: str
    network: Literal["TOPO_FILE_DESC", "CLOS"]
    kind: Literal["EID", "IPV4", "IPV6"]
    address: str
    ports: tuple[str, ...]
    plane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryDevice:
    """What a device is called on the network."""

    ip: str | None = None
    super_device_id: str | None = None
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One node."""

    id: str
    devices: tuple[InventoryDevice, ...]
    host_ip: str | None = None
    super_pod: str = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All nodes."""

    servers: tuple[Server, ...]


def load_inventory(path: Path) -> Inventory:
    """Read an inventory; ConfigError names the file, the line and the key."""
    return load_toml(path, Inventory)
