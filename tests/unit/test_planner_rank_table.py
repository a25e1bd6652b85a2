"""Rank tables against tables written by hand from the documented formats; a missing address is told with its remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend import catalogue
from ssd_ascend.config.plan import Replica
from ssd_ascend.errors import ConfigError
from ssd_ascend.planner.inventory import Address, Inventory, InventoryDevice, Server, load_inventory
from ssd_ascend.planner.rank_table import rank_table


def inventory(servers: int, devices: int, *, pods: int = 1) -> Inventory:
    """Servers whose addresses tell where they belong."""
    return Inventory(
        servers=tuple(
            Server(
                id=f"host-{s}",
                host_ip=f"172.16.0.{s}",
                super_pod=str(s * pods // servers),
                devices=tuple(
                    InventoryDevice(ip=f"192.168.{s}.{d}", super_device_id=str(100 * s + d)) for d in range(devices)
                ),
            )
            for s in range(servers)
        )
    )


def test_one_server_without_addresses() -> None:
    table = rank_table(catalogue.find_topology("ascend-a2-8"), Replica(0, (0, 1), (2,)), "1.0", None)
    assert table == {
        "status": "completed",
        "version": "1.0",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "node_0",
                "device": [
                    {"device_id": "0", "rank_id": "0"},
                    {"device_id": "1", "rank_id": "1"},
                    {"device_id": "2", "rank_id": "2"},
                ],
            }
        ],
    }


def test_two_servers_over_roce() -> None:
    topology = catalogue.find_topology("ascend-a2-roce")
    table = rank_table(topology, Replica(0, (6, 7), (9,)), "1.0", inventory(4, 8))
    assert table == {
        "status": "completed",
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": "host-0",
                "device": [
                    {"device_id": "6", "device_ip": "192.168.0.6", "rank_id": "0"},
                    {"device_id": "7", "device_ip": "192.168.0.7", "rank_id": "1"},
                ],
            },
            {
                "server_id": "host-1",
                "device": [{"device_id": "1", "device_ip": "192.168.1.1", "rank_id": "2"}],
            },
        ],
    }


def test_a_super_pod() -> None:
    topology = catalogue.find_topology("ascend-a3-superpod384")
    table = rank_table(topology, Replica(0, (0, 1), (16,)), "1.2", inventory(48, 16))
    assert table == {
        "status": "completed",
        "version": "1.2",
        "server_count": "2",
        "server_list": [
            {
                "server_id": "host-0",
                "host_ip": "172.16.0.0",
                "device": [
                    {"device_id": "0", "super_device_id": "0", "device_ip": "192.168.0.0", "rank_id": "0"},
                    {"device_id": "1", "super_device_id": "1", "device_ip": "192.168.0.1", "rank_id": "1"},
                ],
            },
            {
                "server_id": "host-1",
                "host_ip": "172.16.0.1",
                "device": [
                    {"device_id": "0", "super_device_id": "100", "device_ip": "192.168.1.0", "rank_id": "2"},
                ],
            },
        ],
        "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "host-0"}, {"server_id": "host-1"}]}],
    }


def test_servers_of_two_pods_are_listed_apart() -> None:
    topology = catalogue.find_topology("ascend-a3-superpod384")
    table = rank_table(topology, Replica(0, (0, 1), (16,)), "1.2", inventory(2, 16, pods=2))
    assert table["super_pod_list"] == [
        {"super_pod_id": "0", "server_list": [{"server_id": "host-0"}]},
        {"super_pod_id": "1", "server_list": [{"server_id": "host-1"}]},
    ]


NINE_FIFTY = """
[[servers]]
id = "host-0"
[[servers.devices]]
[[servers.devices.addresses]]
layer = 0
instance = "rack-0"
network = "TOPO_FILE_DESC"
kind = "EID"
address = "000a"
ports = ["1/0"]
plane = "0"
[[servers.devices.addresses]]
layer = 1
instance = "pod"
network = "CLOS"
kind = "IPV4"
address = "10.0.0.1"
ports = ["1/8"]
plane = "1"
[[servers.devices]]
[[servers.devices.addresses]]
layer = 0
instance = "rack-0"
network = "TOPO_FILE_DESC"
kind = "EID"
address = "000b"
ports = ["1/1"]
plane = "0"
"""


def test_950_from_an_inventory_file(tmp_path: Path) -> None:
    file = tmp_path / "inventory.toml"
    file.write_text(NINE_FIFTY)
    table = rank_table(catalogue.find_topology("ascend-950-superpod"), Replica(0, (0, 1)), "2.0", load_inventory(file))
    mesh = {"net_layer": "0", "net_instance_id": "rack-0", "net_type": "TOPO_FILE_DESC"}

    def eid(address: str, port: str) -> list[dict[str, Any]]:
        return [{"addr_type": "EID", "addr": address, "ports": [port], "plane_id": "0"}]

    assert table == {
        "status": "completed",
        "version": "2.0",
        "rank_count": "2",
        "rank_list": [
            {
                "rank_id": "0",
                "local_id": "0",
                "device_id": "0",
                "level_list": [
                    {**mesh, "rank_addr_list": eid("000a", "1/0")},
                    {
                        "net_layer": "1",
                        "net_instance_id": "pod",
                        "net_type": "CLOS",
                        "rank_addr_list": [
                            {"addr_type": "IPV4", "addr": "10.0.0.1", "ports": ["1/8"], "plane_id": "1"}
                        ],
                    },
                ],
            },
            {
                "rank_id": "1",
                "local_id": "1",
                "device_id": "1",
                "level_list": [{**mesh, "rank_addr_list": eid("000b", "1/1")}],
            },
        ],
    }


def test_an_unknown_key_of_an_inventory_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "inventory.toml"
    file.write_text('[[servers]]\nid = "a"\nhostip = "b"\ndevices = []\n')
    with pytest.raises(ConfigError, match=r"unknown key.*did you mean 'host_ip'"):
        load_inventory(file)


@pytest.mark.parametrize(
    ("topology", "version", "given", "message"),
    [
        ("ascend-a2-roce", "1.0", None, r"rank 0 has no device_ip .give --inventory FILE; on the machine, hccn_tool"),
        ("ascend-a3-superpod384", "1.2", None, r"rank 0 has no super_device_id .*npu-smi info -t spod-info"),
        ("ascend-950-superpod", "2.0", None, r"rank 0 has no address .*hccl_rootinfo"),
        ("ascend-a2-8", "1.2", None, r"ascend-a2-8 takes no rank table 1.2 .nearest possible: 1.0"),
        ("nvidia-h200-8", "1.0", None, r"takes no rank table 1.0 .it needs none"),
        ("ascend-a2-roce", "1.0", inventory(1, 8), r"the inventory has 1 servers, the plan uses node 1"),
        ("ascend-a2-roce", "1.0", inventory(2, 7), r"rank 1 has no device_ip"),
    ],
)
def test_what_is_missing_is_said(topology: str, version: str, given: Inventory | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_table(catalogue.find_topology(topology), Replica(0, (0, 7), (8,)), version, given)


def leaves(value: Any) -> list[Any]:
    """Everything in a table that is neither a table nor a list."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("topology", "version"), [("ascend-a2-roce", "1.0"), ("ascend-a3-16", "1.2"), ("ascend-950-superpod", "2.0")]
)
def test_every_value_is_a_string_and_ranks_count_up(topology: str, version: str) -> None:
    known = inventory(4, 16)
    if version == "2.0":
        address = Address(layer=0, instance="r", network="CLOS", kind="IPV6", address="::1", ports=(), plane="0")
        devices = tuple(InventoryDevice(addresses=(address,)) for _ in range(8))
        known = Inventory(servers=(Server(id="a", devices=devices),))
    table = rank_table(catalogue.find_topology(topology), Replica(0, tuple(range(4)), (4, 5)), version, known)
    assert {type(leaf) for leaf in leaves(table)} == {str}
    assert re.findall(r"'rank_id': '(\d+)'", str(table)) == ["0", "1", "2", "3", "4", "5"]
