"""Every file of `topology/` reads, is what its name says, and gives every number a source; a mistake names its line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend import catalogue
from ssd_ascend.config.topology import NODE, Topology, load_topology
from ssd_ascend.errors import ConfigError

# name -> vendor, devices, devices of a node, GB of a device: from the vendors' pages, written down apart from the files
CLUSTERS = {
    "ascend-a2-8": ("huawei", 8, 8, 64),
    "ascend-a2-roce": ("huawei", 32, 8, 64),
    "ascend-a3-16": ("huawei", 16, 16, 64),
    "ascend-a3-superpod384": ("huawei", 768, 16, 64),
    "ascend-a3-roce": ("huawei", 64, 16, 64),
    "ascend-950-superpod": ("huawei", 8192, 8, 96),
    "ascend-350-16": ("huawei", 16, 16, 112),
    "nvidia-hopper-8": ("nvidia", 8, 8, 80),
    "nvidia-h200-8": ("nvidia", 8, 8, 141),
    "nvidia-b200-8": ("nvidia", 8, 8, 180),
    "nvidia-gb200-nvl72": ("nvidia", 72, 4, 186),
    "laptop-cpu": ("any", 4, 4, 16),
}
COUNTS = {"devices", "nodes", "fanout", "unit"}


def test_the_catalogue_is_what_this_test_knows() -> None:
    assert set(catalogue.names("topology")) == set(CLUSTERS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_what_its_name_says(name: str) -> None:
    topology = catalogue.find_topology(name)
    vendor, devices, node, gigabytes = CLUSTERS[name]
    assert (topology.vendor, topology.devices, topology.size_of(NODE)) == (vendor, devices, node)
    assert topology.device.memory_gb.value == gigabytes
    assert ("scale_out" in {level.reach for level in topology.levels.values()}) or "roce" not in name
    assert topology.launch.collectives == {"huawei": "hccl", "nvidia": "nccl", "any": "gloo"}[vendor]
    assert bool(topology.launch.rank_table_versions) == (vendor == "huawei")


def bare_numbers(value: Any, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Numbers that are neither a figure's value nor a count of the structure."""
    if isinstance(value, dict):
        if {"value", "source", "confidence"} <= set(value):
            return
        for key, inner in value.items():
            yield from bare_numbers(inner, (*keys, key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and keys[-1] not in COUNTS:
        yield ".".join(keys)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_number_has_a_source_and_a_confidence(name: str) -> None:
    data = tomllib.loads((catalogue.folder("topology") / f"{name}.toml").read_text(encoding="utf-8"))
    assert list(bare_numbers(data)) == []
    assert set(data["sources"]) == set(sources(data))


def sources(value: Any) -> Iterator[str]:
    """Every `source` below a value."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "source":
            yield inner
        elif key != "sources":
            yield from sources(inner)


def test_a_bare_number_is_noticed() -> None:
    assert list(bare_numbers({"device": {"memory_gb": 64.0, "shares_host": True}, "nodes": 1})) == ["device.memory_gb"]


def changed(folder: Path, old: str, new: str, *, name: str = "ascend-a3-superpod384") -> Path:
    """A copy of a shipped file with one change."""
    text = (catalogue.folder("topology") / f"{name}.toml").read_text(encoding="utf-8")
    assert old in text
    path = folder / f"{name}.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


def line_of(path: Path, start: str) -> int:
    """The 1-based line that starts so."""
    return next(n for n, line in enumerate(path.read_text().splitlines(), start=1) if line.startswith(start))


@pytest.mark.parametrize(
    ("old", "new", "at", "message"),
    [
        ("[placement]\n", "[placement]\nunits = 2\n", "units", r"placement.units: unknown key.*did you mean 'unit'"),
        (
            "devices = 768",
            "devices = 700",
            "devices",
            r"devices: 700 devices, but .*48 \(superpod\).*= 768",
        ),
        ("nodes = 48", "nodes = 47", "nodes", r"nodes: 47 nodes of 16 devices are 752, but there are 768"),
        ("value = 64.0", "value = -1", "memory_gb", r"device.memory_gb: value is -1"),
        ("value = 64.0", "valu = 64.0", "memory_gb", r"device.memory_gb.valu: unknown key.*did you mean 'value'"),
        (
            '"product", confidence = "vendor"',
            '"produkt", confidence = "vendor"',
            "memory_gb",
            r"did you mean 'product'",
        ),
        ("unit = 2", "unit = 3", "unit", r"placement.unit: a node of 16 is not made of units of 3"),
        ("8, 16]", "8, 32]", "tp_sizes", r"placement.tp_sizes: 32 devices do not fit a node of 16"),
        ('tp_max_level = "node"', 'tp_max_level = "rack"', "tp_max_level", r"no level 'rack'; there are package, node"),
        ("fanout = 2", "fanout = 0", "fanout", r"levels.package.fanout: 0 instances"),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path: Path, old: str, new: str, at: str, message: str) -> None:
    path = changed(tmp_path, old, new)
    with pytest.raises(ConfigError, match=message) as caught:
        load_topology(path)
    assert f"{path}:{line_of(path, at)}: " in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "pair_gbps",
            "400.0",
            r"levels.superpod.pair_gbps: 400.0 GB/s, more than 196.0 of the level inside it \(node\)",
        ),
        ("latency_us", "0.1", r"levels.superpod.latency_us: 0.1 us, less than 0.5 of the level inside it \(node\)"),
    ],
)
def test_a_link_that_gets_better_outwards_is_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    path = changed(tmp_path, "", "")
    lines = path.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith("[levels.superpod]"))
    found = next(n for n in range(number, len(lines)) if lines[n].startswith(key))
    lines[found] = f'{key} = {{ value = {value}, source = "msmodeling", confidence = "simulated" }}'
    if key == "pair_gbps":  # else the device would be slower than one of its pairs, which is another error
        lines[found - 1] = lines[found].replace("pair_gbps", "device_gbps")
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=message) as caught:
        load_topology(path)
    assert f"{path}:{found + 1}: " in str(caught.value)
    lines.insert(number + 1, "allow_inversion = true")
    path.write_text("\n".join(lines))
    assert isinstance(load_topology(path), Topology)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, 'name = "ascend-a3-superpod384"', 'name = "pod"')
    with pytest.raises(ConfigError, match=r"name: 'pod' in a file called ascend-a3-superpod384.toml"):
        load_topology(path)


def test_names_and_paths_find_a_topology(tmp_path: Path) -> None:
    path = changed(tmp_path, "", "")
    assert catalogue.find_topology(str(path)) == catalogue.find_topology("ascend-a3-superpod384")
    with pytest.raises(ConfigError, match=r"unknown topology 'ascend-a3'; known: .*did you mean 'ascend-a3-16'"):
        catalogue.find_topology("ascend-a3")
