"""The rank table of one replica, for machines whose collectives want one (RANK_TABLE_FILE). Called by `plan.py`.

Formats 1.0 (servers joined by RoCE), 1.2 (one or more super pods) and 2.0 (950), after
https://github.com/hicann/hccl, docs/zh/user_guide/cluster_info_config. Every value is a string; ranks are numbered in
physical order and contiguous per server. Nothing needs such a file by default: ranks find each other through a store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ssd_ascend.config.plan import Replica
from ssd_ascend.config.topology import Topology
from ssd_ascend.errors import ConfigError
from ssd_ascend.planner.inventory import Address, Inventory, InventoryDevice, Server
from ssd_ascend.planner.machine import Machine

_NOTHING = InventoryDevice()


def rank_table(topology: Topology, replica: Replica, version: str, inventory: Inventory | None) -> dict[str, Any]:
    """The table for the ranks of `replica`; ConfigError when the cluster has no such format, or an address is missing.

    Without an inventory only a 1.0 table for a single server can be written: all others need addresses.
    """
    known = topology.launch.rank_table_versions
    if version not in known:
        raise ConfigError(
            f"{topology.name} takes no rank table {version}",
            remedy=f"nearest possible: {' or '.join(known)}" if known else "it needs none: leave --rank-table out",
        )
    return _WRITERS[version](_Ranks(topology, replica, inventory))


class _Ranks:
    """The ranks of a replica with their servers and addresses."""

    def __init__(self, topology: Topology, replica: Replica, inventory: Inventory | None) -> None:
        self.topology = topology
        self._inventory = inventory
        self._node_size = Machine.of(topology).node_size
        self.devices = replica.ranks
        self.nodes = tuple(dict.fromkeys(device // self._node_size for device in replica.ranks))
        if inventory is not None and len(inventory.servers) <= max(self.nodes):
            have, last = len(inventory.servers), max(self.nodes)
            raise ConfigError(f"the inventory has {have} servers, the plan uses node {last}", remedy="list them all")

    def server(self, node: int) -> Server:
        """A node as the inventory knows it, or by its number."""
        return self._inventory.servers[node] if self._inventory else Server(id=f"node_{node}", devices=())

    def of(self, node: int) -> list[tuple[int, int, InventoryDevice]]:
        """(rank, device id inside the node, addresses) of every rank on `node`."""
        first, known = node * self._node_size, self.server(node).devices
        found = []
        for rank, device in enumerate(self.devices):
            if device // self._node_size == node:
                local = device - first
                found.append((rank, local, known[local] if local < len(known) else _NOTHING))
        return found

    def need(self, value: str | None, what: str, rank: int) -> str:
        """An address that the format cannot do without."""
        if value is None:
            hint = self.topology.launch.inventory_hint
            raise ConfigError(
                f"rank {rank} has no {what}",
                remedy=f"give --inventory FILE; on the machine, {hint} prints it" if hint else "give --inventory FILE",
            )
        return value


def _version_1_0(ranks: _Ranks) -> dict[str, Any]:
    servers = []
    for node in ranks.nodes:
        devices = []
        for rank, local, known in ranks.of(node):
            entry = {"device_id": str(local), "rank_id": str(rank)}
            if len(ranks.nodes) > 1 or known.ip is not None:
                entry["device_ip"] = ranks.need(known.ip, "device_ip", rank)
            devices.append(entry)
        servers.append({"server_id": ranks.server(node).id, "device": devices})
    return _completed("1.0", servers)


def _version_1_2(ranks: _Ranks) -> dict[str, Any]:
    servers = []
    pods: dict[str, list[dict[str, str]]] = {}
    for node in ranks.nodes:
        server = ranks.server(node)
        devices = []
        for rank, local, known in ranks.of(node):
            entry = {"device_id": str(local), "rank_id": str(rank)}
            entry["super_device_id"] = ranks.need(known.super_device_id, "super_device_id", rank)
            if known.ip is not None:
                entry["device_ip"] = known.ip
            devices.append(entry)
        host = {"host_ip": server.host_ip} if server.host_ip is not None else {}
        servers.append({"server_id": server.id, **host, "device": devices})
        pods.setdefault(server.super_pod, []).append({"server_id": server.id})
    if len(pods) > 1:  # between pods the network is addressed by device
        for node in ranks.nodes:
            for rank, _, known in ranks.of(node):
                ranks.need(known.ip, "device_ip", rank)
    listed = [{"super_pod_id": pod, "server_list": members} for pod, members in pods.items()]
    return {**_completed("1.2", servers), "super_pod_list": listed}


def _completed(version: str, servers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": "completed", "version": version, "server_count": str(len(servers)), "server_list": servers}


def _version_2_0(ranks: _Ranks) -> dict[str, Any]:
    listed = []
    for node in ranks.nodes:
        for rank, local, known in ranks.of(node):
            if not known.addresses:
                ranks.need(None, "address", rank)
            levels = [_level(layer, known.addresses) for layer in sorted({one.layer for one in known.addresses})]
            entry = {"rank_id": str(rank), "local_id": str(local), "device_id": str(local), "level_list": levels}
            listed.append(entry)
    return {"status": "completed", "version": "2.0", "rank_count": str(len(listed)), "rank_list": listed}


def _level(layer: int, addresses: tuple[Address, ...]) -> dict[str, Any]:
    """One network of a device, with its addresses there."""
    here = [one for one in addresses if one.layer == layer]
    listed = [{"addr_type": a.kind, "addr": a.address, "ports": list(a.ports), "plane_id": a.plane} for a in here]
    return {
        "net_layer": str(layer),
        "net_instance_id": here[0].instance,
        "net_type": here[0].network,
        "rank_addr_list": listed,
    }


_WRITERS: Mapping[str, Callable[[_Ranks], dict[str, Any]]] = {
    "1.0": _version_1_0,
    "1.2": _version_1_2,
    "2.0": _version_2_0,
}
