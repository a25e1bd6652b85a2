"""`plan --calibrate`: measured numbers go into a copy of the topology, and from there into plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ssd_ascend import catalogue
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.plan import Wish
from ssd_ascend.config.topology import Topology, load_topology
from ssd_ascend.errors import ConfigError
from ssd_ascend.plan import main
from ssd_ascend.planner import make_plan
from ssd_ascend.planner.calibration import Measured, figures_of, write_calibrated
from ssd_ascend.planner.rates import rates_of
from ssd_ascend.probe import calibrate

FOUND = Measured(
    machine='a "machine" of the tests',
    date="2026-11-29",
    figures={"memory_gbps": 1234.5678, "message_us": 7.0},
    links={"package": {"pair_gbps": 55.0}},
    notes={"message_us": "half of a round trip"},
)


@pytest.mark.parametrize("name", catalogue.names("topology"))
def test_every_topology_can_be_calibrated(name: str, tmp_path: Path) -> None:
    """Those that have a `[calibrated]` section already lose it; nothing else changes."""
    original = catalogue.find_topology(name)
    level = next(iter(original.levels))
    found = Measured(machine="m", date="2026-11-29", figures=FOUND.figures, links={level: {"pair_gbps": 55.0}})
    written = write_calibrated(catalogue.topology_path(name), tmp_path / "mine.toml", found)
    assert written.name == "mine"
    assert written.levels == original.levels
    assert written.software == original.software
    assert written.calibrated is not None
    values = {key: figure.value for key, figure in figures_of(written.calibrated).items()}
    assert values == {"memory_gbps": 1235.0, "message_us": 7.0, f"links.{level}.pair_gbps": 55.0}


def test_a_second_calibration_replaces_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    write_calibrated(catalogue.topology_path("ascend-a3-16"), first, FOUND)
    again = Measured(machine="m", date="2026-11-30", figures={"memory_gbps": 1000.0})
    written = write_calibrated(first, second, again)
    assert written.calibrated is not None
    assert figures_of(written.calibrated).keys() == {"memory_gbps"}
    assert second.read_text().count("\nprobe = ") == 1


def test_plans_go_by_what_was_measured(tmp_path: Path) -> None:
    preset = catalogue.find_preset("qwen3-8b-eagle3")
    slow = Measured(machine="m", date="2026-11-29", figures={"memory_gbps": 100.0})
    written = write_calibrated(catalogue.topology_path("ascend-a3-16"), tmp_path / "slow.toml", slow)
    assert rates_of(written, "bfloat16").memory == 100.0 * 1e3
    published = make_plan(catalogue.find_topology("ascend-a3-16"), preset, Wish(tp=4), preset_name="p")
    measured = make_plan(load_topology(tmp_path / "slow.toml"), preset, Wish(tp=4), preset_name="p")
    assert measured.times.decode_ms > 4.0 * published.times.decode_ms
    assert measured.calibrated
    assert not published.calibrated


def test_the_name_must_be_a_topologys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"call it NAME\.toml"):
        write_calibrated(catalogue.topology_path("ascend-a3-16"), tmp_path / "mine.txt", FOUND)


@pytest.mark.parametrize("there", [False, True], ids=["a new file", "a file that is there"])
def test_no_topology_is_the_only_one_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, there: bool
) -> None:
    """What was measured before is measured anew; else a machine without devices can only be one thing."""
    mine, asked = tmp_path / "mine.toml", []
    if there:
        write_calibrated(catalogue.topology_path("ascend-a3-16"), mine, FOUND)

    def measure(topology: Topology) -> Measured:
        asked.append(topology.name)
        return replace(FOUND, links={})

    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "devices", lambda: calibrate.Devices("cpu", share_host=True))
    assert main(["--calibrate", str(mine)]) == 0
    assert asked == ["mine" if there else "laptop-cpu"]
    assert load_topology(mine).device.shares_host is not there
    assert f"{mine}: {asked[0]}, measured on" in capsys.readouterr().out


def test_a_machine_with_devices_is_asked_which_cluster_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "devices", lambda: calibrate.Devices("a card", share_host=False))
    assert main(["--calibrate", str(tmp_path / "mine.toml")]) == 2
    told = capsys.readouterr().err
    assert "this machine (a card) does not say which cluster" in told
    assert "ascend-a3-16" in told
    assert "laptop-cpu" not in told
    assert "PRESET" not in told


def test_devices_that_are_not_there_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "load_backend", lambda name: load_backend("cpu"))
    with pytest.raises(ConfigError, match=r"ascend-a3-16 is of devices .*and this machine has none"):
        calibrate.measure(catalogue.find_topology("ascend-a3-16"))


def test_a_name_that_cannot_be_is_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laptop-cpu", "--calibrate", "mine.txt"]) == 2
    assert "call it NAME.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laptop-cpu", "--calibrate", str(tmp_path / "here.toml")]) == 0
    found = load_topology(tmp_path / "here.toml").calibrated
    assert found is not None
    known = {"memory_gbps", "tflops", "message_us", "message_gbps", "collective_us", "links.node.pair_gbps"}
    assert figures_of(found).keys() >= known
    assert "message_us" in capsys.readouterr().out
