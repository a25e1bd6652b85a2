"""A registry lists without importing, imports on first use, and explains what it cannot give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ssd_ascend.backends.registry import load_backend
from ssd_ascend.errors import ConfigError
from ssd_ascend.registry import Registry

ENTRIES = {"ordered": "collections:OrderedDict", "absent": "no_such_package_here:Thing", "ours": "ssd_ascend.nowhere:X"}


def test_names_keep_their_order_and_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_probe.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[int] = Registry("thing", {"b": "lazy_probe:VALUE", "a": "lazy_probe:VALUE"})
    assert registry.names() == ("b", "a") == tuple(registry)
    assert len(registry) == 2
    assert "lazy_probe" not in sys.modules
    assert registry.get("a") == 7
    monkeypatch.delitem(sys.modules, "lazy_probe")


def test_unknown_name_lists_the_known_and_the_nearest() -> None:
    registry: Registry[type] = Registry("speculator", ENTRIES)
    assert "orderd" not in registry
    with pytest.raises(ConfigError, match=r"unknown speculator 'orderd'; known: absent, ordered, ours \(did you mean"):
        registry.get("orderd")


def test_ones_own_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someones_own.py").write_text("VALUE = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[int] = Registry("thing", ENTRIES)
    assert registry.get("someones_own:VALUE") == 8
    assert "someones_own:VALUE" not in registry
    with pytest.raises(ConfigError, match="thing 'someones_own:value': there is no 'value' in someones_own"):
        registry.get("someones_own:value")
    with pytest.raises(ConfigError, match="needs the Python package 'nobodys'"):
        registry.get("nobodys:VALUE")
    monkeypatch.delitem(sys.modules, "someones_own")


@pytest.mark.parametrize("name", ["cpu:3", "npu:0"])
def test_a_device_is_a_kind_without_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}', and should be a kind without a number: cpu, .*npu \(among"):
        load_backend(name)
    monkeypatch.setenv("SSD_DEVICE", name)
    with pytest.raises(ConfigError, match="without a number"):
        load_backend(None)


def test_a_missing_dependency_is_named() -> None:
    with pytest.raises(ConfigError, match=r"backend 'absent' needs the Python package 'no_such_package_here'.*doctor"):
        Registry[type]("backend", ENTRIES).get("absent")


def test_a_typing_error_in_our_own_table_is_not_blamed_on_the_user() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ssd_ascend\.nowhere"):
        Registry[type]("backend", ENTRIES).get("ours")


def test_later_changes_to_the_table_do_not_reach_the_registry() -> None:
    table = dict(ENTRIES)
    registry: Registry[type] = Registry("thing", table)
    table.clear()
    assert len(registry) == len(ENTRIES)
